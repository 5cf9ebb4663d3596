"""What ends before its time: clients that leave while pictures are read, and the process when its model goes."""

import asyncio
import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.picture_checkpoints import encoded, picture, write_idefics3
from weft.server.errors import EngineUnavailableError
from weft.server.pictures import process
from weft.server.pictures.calls import Made
from weft.server.pictures.process import PictureProcess

TOKEN = 702


def test_nothing_is_left_of_it_when_its_model_goes(tmp_path: Path) -> None:
    write_idefics3(tmp_path)

    def files() -> set[str]:
        return {f"{each.name} {os.readlink(each)}" for each in Path("/proc/self/fd").iterdir() if each.exists()}

    async def run() -> tuple[int, "weakref.ref[PictureProcess]"]:
        reader = PictureProcess(tmp_path)
        assert (await reader.read(encoded(picture(1, 80, 50)), TOKEN)).picture is not None
        assert reader._process is not None
        pid = reader._process._process.pid
        reader.close()
        return pid, weakref.ref(reader)

    asyncio.run(asyncio.sleep(0))
    before = files()
    pid, reader = asyncio.run(run())
    deadline = time.monotonic() + 60
    while reader() is not None or files() - before:  # a thread lets go a moment later
        gc.collect()
        assert time.monotonic() < deadline, files() - before
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


class FakeProcess:
    """Reads a picture once it may."""

    sign = "<image>"

    def __init__(self, folder: Path, *engine: Any) -> None:
        self.engine = engine
        self.may_read, self.is_reading, self.is_alive = threading.Semaphore(0), threading.Event(), True

    def load_fault(self) -> None:
        """None."""

    def read(self, data: bytes) -> Made:
        self.is_reading.set()
        assert self.may_read.acquire(timeout=60)
        self.is_reading.clear()
        return Made(text="x", placeholder="x", num_tokens=1, num_bytes=1) if self.is_alive else Made("it died")

    def shared(self, made: Made) -> int:
        return os.memfd_create("weft-test")

    def empty(self) -> None:
        """It has no memory."""

    def kill(self) -> None:
        self.is_alive = False
        self.may_read.release()

    close = kill


async def begun(reader: PictureProcess) -> FakeProcess:
    """Its process, which reads."""
    while (found := reader._process) is None or not found.is_reading.is_set():  # type: ignore[attr-defined]
        await asyncio.sleep(0.001)
    assert isinstance(found, FakeProcess)
    return found


def test_what_nobody_waits_for_any_more_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the picture at hand, whose turn lasts until it is done; its memory is let go like any other."""
    monkeypatch.setattr(process, "ReaderProcess", FakeProcess)

    async def run() -> None:
        reader = PictureProcess(tmp_path)
        left = [asyncio.create_task(reader.read(b"%d" % i, TOKEN)) for i in range(5)]
        fake = await begun(reader)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        other = asyncio.create_task(reader.read(b"other", TOKEN))
        await asyncio.sleep(0.05)
        fake.may_read.release()
        while len(reader.held._held) < 1:
            await asyncio.sleep(0.001)
        assert not other.done()
        await begun(reader)
        fake.may_read.release()
        found = await other
        assert set(reader.held._kept) == {("", process._digest(each)) for each in (b"0", b"other")}
        assert found.picture is not None
        reader.close()
        assert reader.held._held.keys() == {found.picture.shared}
        del found, other
        await asyncio.sleep(0)  # the loop lets go of the task
        assert not reader.held._held

    asyncio.run(run())


def test_who_waits_is_told_when_the_engine_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of a picture. Later ones are read by another process."""
    monkeypatch.setattr(process, "ReaderProcess", FakeProcess)

    async def run() -> None:
        reader = PictureProcess(tmp_path)
        tasks = [asyncio.create_task(reader.read(b"%d" % i, TOKEN)) for i in range(3)]
        first = await begun(reader)
        reader.close()
        for task in tasks:
            with pytest.raises(EngineUnavailableError):
                await task
        later = asyncio.create_task(reader.read(b"0", TOKEN))
        second = await begun(reader)
        assert second is not first
        second.may_read.release()
        assert (await later).picture is not None

    asyncio.run(run())


def test_no_process_is_started_for_an_engine_that_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it goes before a picture has its turn."""
    started = list[Any]()
    monkeypatch.setattr(process, "ReaderProcess", lambda *given: started.append(given))

    async def run() -> None:
        reader = PictureProcess(tmp_path)
        task = asyncio.create_task(reader.read(b"0", TOKEN))
        await asyncio.sleep(0)
        reader.close()
        with pytest.raises(EngineUnavailableError):
            await task
        assert not started

    asyncio.run(run())


def test_a_process_that_starts_while_the_engine_goes_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_start, ended = threading.Event(), threading.Event()

    class Slow(FakeProcess):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            assert may_start.wait(60)

        def close(self) -> None:
            ended.set()

    monkeypatch.setattr(process, "ReaderProcess", Slow)
    monkeypatch.setattr(process, "END_S", 0.01)

    async def run() -> None:
        reader = PictureProcess(tmp_path)
        task = asyncio.create_task(reader.read(b"0", TOKEN))
        while not reader._lock.locked():
            await asyncio.sleep(0.001)
        reader.close()
        may_start.set()
        with pytest.raises(EngineUnavailableError):
            await task
        assert ended.is_set() and reader._process is None

    asyncio.run(run())


def test_another_engine_has_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ReaderProcess", FakeProcess)

    async def run() -> None:
        reader, found = PictureProcess(tmp_path), list[FakeProcess]()
        for i, dtype in enumerate(("float32", "bfloat16", "bfloat16")):
            task = asyncio.create_task(reader.read(b"%d" % i, TOKEN, dtype=dtype))
            found.append(await begun(reader))
            found[-1].may_read.release()
            await task
        assert [each.engine[1] for each in found] == ["float32", "bfloat16", "bfloat16"] and found[1] is found[2]

    asyncio.run(run())
