"""Subtitles against what is written by hand."""

from weft.server.speech.formats import srt, verbose, vtt
from weft.server.speech.segments import Facts, Segment


def segment(start: float, end: float, text: str) -> Segment:
    return Segment(start, end, text, [1, 2], [(1, -0.5)], Facts(300, 0.2, -0.5, 1.5, 0.1))


SEGMENTS = [segment(0, 2.5, " Hello --> <b>\n\nthere,"), segment(3599.9996, 36610.04, " you.\n")]


def test_srt() -> None:
    assert srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello -> <b> there,\n\n2\n01:00:00,000 --> 10:10:10,040\nyou.\n\n"
    )
    assert srt([]) == ""


def test_vtt() -> None:
    assert vtt(SEGMENTS) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello -&gt; &lt;b&gt; there,\n\n"
        "01:00:00.000 --> 10:10:10.040\nyou.\n\n"
    )
    assert vtt([]) == "WEBVTT\n\n"


def test_verbose() -> None:
    assert verbose(SEGMENTS)[1] == {
        "id": 1,
        "seek": 300,
        "start": 3600.0,
        "end": 36610.04,
        "text": " you.\n",
        "tokens": [1, 2],
        "temperature": 0.2,
        "avg_logprob": -0.5,
        "compression_ratio": 1.5,
        "no_speech_prob": 0.1,
    }
