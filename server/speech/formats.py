"""How segments are written: subtitles, and OpenAI's JSON."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from weft.server.speech.segments import Segment


def srt(segments: Sequence[Segment]) -> str:
    """SubRip, an entry for each segment."""
    entries = [
        f"{i}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{_line(each)}\n\n"
        for i, each in enumerate(segments, 1)
    ]
    return "".join(entries)


def vtt(segments: Sequence[Segment]) -> str:
    """WebVTT, a cue for each segment."""
    cues = [f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{escape(_line(each))}\n\n" for each in segments]
    return "".join(["WEBVTT\n\n", *cues])


def _clock(seconds: float, point: str) -> str:
    whole, thousandths = divmod(round(1000 * seconds), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{thousandths:03}"


def _line(segment: Segment) -> str:
    return " ".join(segment.text.split()).replace("-->", "->")


def verbose(segments: Sequence[Segment]) -> list[dict[str, object]]:
    """The segments of verbose_json."""
    return [
        {
            "id": i,
            "seek": each.window.seek,
            "start": round(each.start, 3),
            "end": round(each.end, 3),
            "text": each.text,
            "tokens": list(each.tokens),
            "temperature": each.window.temperature,
            "avg_logprob": each.window.avg_logprob,
            "compression_ratio": each.window.compression_ratio,
            "no_speech_prob": each.window.no_speech_prob,
        }
        for i, each in enumerate(segments)
    ]


def words(segments: Sequence[Segment]) -> list[dict[str, object]]:
    """The words of verbose_json."""
    return [
        {"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)}
        for each in segments
        for word in each.words
    ]
