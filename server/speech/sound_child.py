"""Decodes a file of sound, as a process: `python -m weft.server.speech.sound_child FD RATE SECONDS`.

FFmpeg reads what strangers made, so the kernel bounds it, as it bounds templates: memory, time, the length of what is
written, and the number of open files, so FFmpeg opens no other one. The file comes as standard input. The sound goes to
FD, as samples of 16 bits, of one channel, RATE in a second. One line of JSON on standard output says how many samples
there are, or what is wrong.
"""

import io
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Final

import av
import av.subtitles.codeccontext
import av.subtitles.stream  # these two now: later, no file can be opened
from av import AudioFrame, AudioResampler, AudioStream
from av.container import InputContainer

from weft.server.child_limits import bound_this_process

MAX_CHANNELS: Final = 8
MAX_RATE: Final = 384_000
CPU_S: Final = 200.0
_MAX_BYTES: Final = 512 << 20
"""By which the process may grow."""
_TARGET: Final = 3
"""The number of the file of samples, and the highest of all open ones."""
_FORMATS: Final = "wav,flac,mp3,ogg,mov,matroska"
"""None that names other files, such as a list of pieces. `mov` reads mp4 and m4a, `matroska` webm."""
_CODECS: Final = (
    "aac,alac,flac,mp2,mp2float,mp3,mp3float,opus,libopus,vorbis,libvorbis,"
    "pcm_alaw,pcm_f32le,pcm_f64le,pcm_mulaw,pcm_s16le,pcm_s24le,pcm_s32le,pcm_u8"
)
_OPTIONS: Final = {"format_whitelist": _FORMATS, "codec_whitelist": _CODECS, "protocol_whitelist": "none"}


class SoundFaultError(Exception):
    """The file cannot be used; the message says why."""


class SoundTooLongError(SoundFaultError):
    """It has more seconds than are allowed."""


def main(target: int, rate: int, max_s: float) -> None:
    """Decode standard input, and report.

    Args:
        target: Where samples go: the number of an open file.
        rate: Of these samples.
        max_s: Most seconds of sound.
    """
    bound_this_process(_MAX_BYTES)
    os.dup2(target, _TARGET)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_TARGET + 1, _TARGET + 1))
    most = 2 * int((max_s + 1) * rate)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # which ends this process, whatever it is doing
    report: dict[str, object] = {}
    try:
        with open(_TARGET, "wb") as file, open(0, "rb", closefd=False) as source:
            report["samples"] = decode(source, file, rate, max_s)
    except SoundFaultError as error:
        report = {"fault": str(error), "is_too_long": isinstance(error, SoundTooLongError)}
    except av.FFmpegError as error:
        report = {"fault": f"it is damaged, or no sound that can be decoded ({error.strerror})"}
    except OSError as error:
        report = {"fault": f"the sound cannot be written ({error.strerror})", "is_ours": True}
    except (ValueError, MemoryError) as error:
        report = {"fault": f"it cannot be decoded ({type(error).__name__})"}
    os.write(1, json.dumps(report).encode() + b"\n")
    os._exit(0)  # nothing that the file may have broken is taken down


def decode(source: io.BufferedIOBase, target: io.BufferedIOBase, rate: int, max_s: float) -> int:
    """Decode the first stream of sound; returns the number of samples.

    Raises:
        SoundFaultError: There is none, or it exceeds a bound.
        FFmpegError: The file is damaged.
    """
    num_samples, max_samples = 0, int(max_s * rate)
    with av.open(source, "r", options=dict(_OPTIONS)) as container:
        if not container.streams.audio:
            raise SoundFaultError("it holds no sound")
        stream = container.streams.audio[0]
        codec = stream.codec_context
        if codec.name not in _CODECS.split(","):
            raise SoundFaultError(f"its sound is encoded as {codec.name}, which is not supported")
        _check(codec.channels, codec.sample_rate)
        for piece in _resampled(_frames(container, stream), rate):
            num_samples += piece.samples
            if num_samples > max_samples:
                raise SoundTooLongError(f"it must have at most {max_s:g} s of sound, got more")
            target.write(memoryview(piece.planes[0])[: 2 * piece.samples])
    return num_samples


def _frames(container: InputContainer, stream: AudioStream) -> Iterator[AudioFrame]:
    """What can be decoded. A damaged packet is left out, as FFmpeg's own command leaves it out."""
    is_damaged, num_frames = False, 0
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except MemoryError:
            raise
        except av.FFmpegError:  # of many kinds: a decoder may call damage forbidden, or not yet written
            is_damaged = True
            continue
        num_frames += len(frames)
        yield from (frame for frame in frames if isinstance(frame, AudioFrame))
    if is_damaged and not num_frames:
        raise SoundFaultError("it is damaged, nothing of it can be decoded")


def _resampled(frames: Iterator[AudioFrame], rate: int) -> Iterator[AudioFrame]:
    """One channel at a rate; what comes in may change its own, as in files that were joined."""
    resampler, form = AudioResampler(format="s16", layout="mono", rate=rate), None
    for frame in frames:
        now = frame.format.name, frame.layout.name, frame.sample_rate
        if now != form:
            _check(frame.layout.nb_channels, frame.sample_rate)
            if form is not None:
                yield from resampler.resample(None)
                resampler = AudioResampler(format="s16", layout="mono", rate=rate)
            form = now
        yield from resampler.resample(frame)
    if form is not None:
        yield from resampler.resample(None)


def _check(num_channels: int, rate: int) -> None:
    for name, value, most in (("channels", num_channels, MAX_CHANNELS), ("samples in a second", rate, MAX_RATE)):
        if not 1 <= value <= most:
            raise SoundFaultError(f"it must have between 1 and {most} {name}, got {value}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
