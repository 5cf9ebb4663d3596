"""Files of sound: every container, what is refused, and processes that do not answer."""

import asyncio
import io
import os
import sys
import tempfile
import zipfile
from array import array
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.server.hearing import wav, wav_header
from weft.server.errors import (
    ApiError,
    BodyTooLargeError,
    InvalidRequestError,
    QueueFullError,
    UnsupportedParameterError,
)
from weft.server.http import form
from weft.server.http.form import CountedFile, FileRoom
from weft.server.speech import sound


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go; none is ever left."""
    (at := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(at))
    yield at
    assert list(at.iterdir()) == []


def samples_of(data: bytes, rate: int = 16000, max_s: float = 60) -> Any:
    async def run() -> Any:
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            found = await sound.decode(file, rate, max_s, asyncio.Semaphore(1), room := FileRoom())
            assert room.num_bytes == 2 * found.num_samples
            with closing(found.kept):
                assert found.seconds == found.num_samples / rate
                return array("h", found.read(0, found.num_samples))

    return asyncio.run(run())


def tone(container: str, codec: str, rate: int, form: str, seconds: float = 1.0) -> bytes:
    """A tone of 440 Hz on two channels."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, options={"strict": "experimental"})
        assert isinstance(stream, av.AudioStream)
        stream.layout = "stereo"  # type: ignore[assignment]
        times = np.arange(int(seconds * rate)) / rate
        wave = np.tile((8000 * np.sin(2 * np.pi * 440 * times)).astype(np.int16)[:, None], (1, 2)).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(wave, format="s16", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        resampler = av.AudioResampler(format=form, layout="stereo", rate=rate, frame_size=stream.frame_size or None)
        for piece in [*resampler.resample(frame), *resampler.resample(None), None]:
            output.mux(stream.encode(piece))
    return file.getvalue()


def silent_film() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=5)
        assert isinstance(stream, av.VideoStream)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for frame in [av.VideoFrame(32, 32, "yuv420p"), None]:
            output.mux(stream.encode(frame))
    return file.getvalue()


@pytest.mark.parametrize(
    ("container", "codec", "rate", "form"),
    [
        ("wav", "pcm_s16le", 44100, "s16"),
        ("wav", "pcm_f32le", 8000, "flt"),
        ("flac", "flac", 48000, "s16"),
        ("mp3", "libmp3lame", 44100, "s16p"),
        ("ogg", "libopus", 48000, "s16"),
        ("ogg", "vorbis", 22050, "fltp"),
        ("ipod", "aac", 44100, "fltp"),
        ("webm", "libopus", 48000, "s16"),
    ],
)
def test_containers(container: str, codec: str, rate: int, form: str) -> None:
    samples = np.array(samples_of(tone(container, codec, rate, form)))
    assert len(samples) == pytest.approx(16000, rel=0.08)  # what some codecs put around it
    middle = samples[4000:12000]
    assert np.abs(middle).max() == pytest.approx(8000, rel=0.1)
    assert np.count_nonzero(np.diff(np.signbit(middle))) == pytest.approx(440, abs=2)


def test_sound_at_the_models_rate_is_not_changed() -> None:
    data = wav(0.5)
    assert samples_of(data).tobytes() == data[44:]
    assert len(samples_of(data, rate=8000)) == 4000


def damaged(data: bytes, byte: bytes = b"\0") -> bytes:
    return data[: len(data) // 2] + byte * 300 + data[len(data) // 2 + 300 :]


@pytest.mark.parametrize(
    "data",
    [
        damaged(tone("mp3", "libmp3lame", 44100, "s16p", 4)),
        damaged(tone("ipod", "aac", 44100, "fltp", 4)),
        damaged(tone("ipod", "aac", 44100, "fltp", 4), b"\xff"),  # FFmpeg has another error for it
        tone("mp3", "libmp3lame", 44100, "s16p", 2) + b"junk" * 1000 + tone("mp3", "libmp3lame", 44100, "s16p", 2),
        tone("mp3", "libmp3lame", 44100, "s16p", 2) + tone("mp3", "libmp3lame", 16000, "s16p", 2),
        tone("flac", "flac", 48000, "s16", 8)[:-9000],
    ],
)
def test_damage_costs_only_what_is_damaged(data: bytes) -> None:
    """As for FFmpeg's own command; a file whose rate changes, as in joined ones, is read on."""
    assert 3.5 < len(samples_of(data)) / 16000 < 8.2


def zipped() -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("a.wav", wav(0.1))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "damaged, or no sound"),
        (b"hello " * 1000, "damaged, or no sound"),
        (zipped(), "damaged, or no sound"),
        (os.urandom(5000), "damaged, or no sound|no sound"),
        (wav_header(3200, 0, 1) + bytes(3200), "damaged, or no sound"),
        (wav_header(80000, 16000, 400) + bytes(80000), "between 1 and 8 channels, got 400"),
        (wav_header(18000, 16000, 9) + bytes(18000), "between 1 and 8 channels, got 9"),
        (wav_header(8000, 10**9, 1) + bytes(8000), "between 1 and 384000 samples in a second, got 1000000000"),
        (wav_header(0, 16000, 1), "holds no sound"),
        (silent_film(), "holds no sound"),
        (tone("ipod", "aac", 44100, "fltp")[:3000], "damaged, or no sound"),
        (tone("flac", "flac", 48000, "s16")[:60], "damaged, or no sound|holds no sound"),
        (b"ffconcat version 1.0\nfile /etc/hostname\n", "no sound that can be decoded"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n", "no sound that can be decoded"),
        (tone("adts", "aac", 44100, "fltp"), "no sound that can be decoded"),
        (tone("wav", "adpcm_ima_wav", 44100, "s16p"), "encoded as adpcm_ima_wav, which is not supported"),
    ],
)
def test_what_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        samples_of(data)
    assert (caught.value.status, caught.value.param) == (400, "file")


def test_sound_that_is_too_long() -> None:
    with pytest.raises(BodyTooLargeError, match=r"at most 1.5 s of sound, got more") as caught:
        samples_of(wav(1.6), max_s=1.5)
    assert (caught.value.status, caught.value.param) == (413, "file")
    assert len(samples_of(wav(1.5), max_s=1.5)) == 24000


def test_sound_that_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "MOST_BYTES", 32000)
    assert len(samples_of(wav(1.0))) == 16000
    with pytest.raises(QueueFullError, match="more than 32000 bytes"):
        samples_of(wav(1.1))


def test_bytes_count_until_nobody_has_the_file() -> None:
    file = CountedFile(room := FileRoom())
    file.count(5)
    assert room.num_bytes == 5
    del file
    assert room.num_bytes == 0


def test_what_was_recorded_without_its_length() -> None:
    """As programs write it that do not know how much will come."""
    data = wav_header(0, 16000, 1)[:-4] + b"\xff" * 4 + bytes(3200)
    assert len(samples_of(data)) == 1600


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -PROF $$", "takes too long"),
        ("exit 3", "died of it"),
        ("echo {", "died of it"),
        ("exec sleep 60", "0.5 s"),
        (f"exec {sys.executable} -P -m weft.server.speech.sound_child 5 $5 $6 5>/dev/full", "No space left"),
    ],
)
def test_processes_that_do_not_answer(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_child(script, tmp_path, monkeypatch)
    monkeypatch.setattr(sound, "DECODE_S", 0.5)
    with pytest.raises(ApiError, match=message):
        samples_of(wav(0.1))


def test_a_process_ends_when_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_child(f"echo $$ > {tmp_path}/pid; mv {tmp_path}/pid {tmp_path}/began; exec sleep 60", tmp_path, monkeypatch)

    async def run() -> int:
        with tempfile.TemporaryFile() as file:
            decoding = asyncio.create_task(sound.decode(file, 16000, 9, asyncio.Semaphore(1), FileRoom()))
            while not (tmp_path / "began").exists():
                await asyncio.sleep(0.01)
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)
        return int((tmp_path / "began").read_text())

    with pytest.raises(ProcessLookupError):
        os.kill(asyncio.run(run()), 0)


def replace_child(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := folder / "child").write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setattr(sound.sys, "executable", str(path))  # type: ignore[attr-defined]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    sound.check_decoder()

    def nothing(name: str) -> Any:
        return None

    monkeypatch.setattr(sound.importlib.util, "find_spec", nothing)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedParameterError, match=r"pip install 'weft\[audio\]'"):
        sound.check_decoder()
