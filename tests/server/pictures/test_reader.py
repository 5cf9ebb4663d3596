"""A process that reads pictures and says what is not so: that is the fault of a picture, and nobody waits for it."""

import logging
import os
import sys
import time
from pathlib import Path

import msgspec
import pytest

from weft.engine.wire.messages import frame
from weft.engine.wire.pictures import MAX_REQUEST_BYTES
from weft.server.errors import InternalError, QueueFullError
from weft.server.pictures import held, process, reader
from weft.server.pictures.calls import Made, Ready
from weft.server.pictures.process import PictureProcess
from weft.server.pictures.reader import ReaderProcess

READY = Ready("<image>")


class Answering:
    """A reader that answers so, once it has written three bytes to its memory."""

    folder: Path

    def __init__(self, made: Made | None, ready: Ready = READY) -> None:
        answers = [frame(msgspec.msgpack.encode(each)) for each in (ready, made) if each is not None]
        script = self.folder / "python"
        code = f"import os, sys, time\nos.pwrite(int(sys.argv[-1]), b'abc', 0)\nos.write(0, {b''.join(answers)!r})\n"
        script.write_text(f"#!{os.path.realpath('/proc/self/exe')}\n{code}time.sleep(60)\n")
        script.chmod(0o700)
        self.pictures = PictureProcess(self.folder)

    def read(self) -> held.ReadPicture:
        results = list[held.ReadPicture]()
        self.pictures._read(b"x", ("", b"x"), (7, "float32"), 0, results)
        return results[0]

    @property
    def process(self) -> ReaderProcess:
        assert self.pictures._process is not None
        return self.pictures._process


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Answering]:
    Answering.folder = tmp_path
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return Answering


def test_what_it_has_made_is_taken(answering: type[Answering]) -> None:
    reading = answering(Made(num_bytes=3))
    found = reading.read()
    assert found.picture is not None and found.picture.shared is not None
    assert os.pread(found.picture.shared.number, 9, 0) == b"abc"
    assert os.fstat(reading.process._made).st_size == 0
    reading.pictures.close()


@pytest.mark.parametrize("num_bytes", [0, -1, 4, MAX_REQUEST_BYTES + 1])
def test_what_it_says_of_its_memory_is_not_believed(answering: type[Answering], num_bytes: int) -> None:
    reading = answering(Made(num_bytes=num_bytes))
    assert reading.read().made.fault == reader.DIED
    assert not reading.process.is_alive and not reading.pictures.held._held


def test_its_memory_is_emptied_where_there_is_no_room(
    answering: type[Answering], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "MAX_HELD_BYTES", 2)
    reading = answering(Made(num_bytes=3))
    with pytest.raises(QueueFullError):
        reading.read()
    assert os.fstat(reading.process._made).st_size == 0
    reading.pictures.close()


def test_it_is_not_waited_for_for_ever(answering: type[Answering], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "READ_S", 0.1)
    began = time.monotonic()
    assert answering(None).read().made.fault == "to read it takes more than 0.1 s"
    assert time.monotonic() - began < process.FAULT_S


def test_nothing_that_is_started_later_has_its_files(answering: type[Answering]) -> None:
    reading = answering(Made(num_bytes=3))
    reading.read()
    assert not os.get_inheritable(reading.process._said)
    reading.pictures.close()


def test_why_it_cannot_be_loaded_is_told_to_the_log_alone(
    answering: type[Answering], caplog: pytest.LogCaptureFixture
) -> None:
    reading = answering(None, Ready(fault="OSError", text="no such file: /secret"))
    with caplog.at_level(logging.WARNING), pytest.raises(InternalError) as caught:
        reading.read()
    assert "cannot be loaded (OSError)" in caught.value.message and "secret" not in caught.value.message
    assert "the processor that reads pictures cannot be loaded: OSError: no such file: /secret" in caplog.messages
