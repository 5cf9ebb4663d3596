import os
import pathlib
import select
import struct
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from weft.engine.wire import status_page
from weft.engine.wire.status_page import Status, StatusPage

READER = """
import sys
from weft.engine.wire import status_page
from weft.engine.wire.status_page import StatusPage
status_page._NUM_TRIES = 10**6  # a writer that waits for its processor in the middle of a write is not given up
page = StatusPage(sys.argv[1])
print("ready", flush=True)
seen = set()
while True:
    s = page.read()
    assert s.num_steps == s.epoch_id == s.prompt_tokens == s.num_preemptions == int(s.step_seconds), s
    if s.num_steps not in seen:
        seen.add(s.num_steps)
        if len(seen) == 10:
            print("some seen", flush=True)
    if s.is_ready:
        break
"""


def reading(number: int, *, is_last: bool = False) -> Status:
    return Status(
        epoch_id=number,
        is_ready=int(is_last),
        num_steps=number,
        prompt_tokens=number,
        num_preemptions=number,
        step_seconds=float(number),
    )


def test_a_new_page_says_that_no_engine_has_written(tmp_path: pathlib.Path) -> None:
    page = StatusPage(tmp_path / "status")
    assert page.read() == Status()
    assert not page.read().is_alive


def test_reading_is_what_was_written_and_outlives_the_writer(tmp_path: pathlib.Path) -> None:
    writer = StatusPage(tmp_path / "status")
    status = Status(epoch_id=(1 << 63) + 1, is_ready=1, progress_time=12.5, num_blocks=7, step_seconds=0.25)
    writer.write(Status(epoch_id=1))
    writer.write(status)
    writer.close()
    assert StatusPage(tmp_path / "status").read() == status


def test_is_alive_until_it_is_silent_for_longer_than_it_said() -> None:
    now = time.monotonic()
    assert Status(is_ready=1, stall_time=now + 500).is_alive
    assert not Status(is_ready=1, stall_time=now - 1).is_alive
    assert Status(is_ready=1, progress_time=now - 500, stall_time=0.0).is_alive, "not judged"
    assert not Status(is_ready=0, stall_time=now + 500).is_alive
    assert Status(stall_time=now - 1).is_stalled
    assert not Status(progress_time=now - 500).is_stalled, "loading is no stalling"


def test_a_reader_in_another_process_sees_whole_readings_only(tmp_path: pathlib.Path) -> None:
    """The version was cleared for an instant while it was written: zero twice looked like a quiet page."""
    page = StatusPage(tmp_path / "status")
    command = [sys.executable, "-c", READER, str(tmp_path / "status")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        end = time.monotonic() + 0.5
        number = 0
        while time.monotonic() < end or not select.select([reader.stdout], [], [], 0)[0]:
            number += 1
            page.write(reading(number))
            if number % 100 == 0:
                time.sleep(1e-4)  # to be scheduled out here rather than in a write
        page.write(reading(number + 1, is_last=True))
    assert reader.returncode == 0


def test_a_writer_that_died_in_a_write_stops_neither_readers_nor_its_successor(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(status_page, "time", SimpleNamespace(sleep=pauses.append))
    page = StatusPage(tmp_path / "status")
    page.write(reading(1))
    with open(tmp_path / "status", "r+b") as file:
        (version,) = struct.unpack("<Q", file.read(8))
        file.seek(0)
        file.write(struct.pack("<Q", version + 1))  # odd: as if a write were under way
    assert page.read() == reading(1)
    assert 0.01 < sum(pauses) < 0.1
    StatusPage(tmp_path / "status").write(reading(2))
    assert page.read() == reading(2)


def test_a_number_that_does_not_fit_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(struct.error):
        StatusPage(tmp_path / "status").write(Status(num_steps=-1))


def test_the_page_has_room_on_the_disk(tmp_path: pathlib.Path) -> None:
    """On a full one the first write killed the process with SIGBUS."""
    StatusPage(tmp_path / "status").close()
    status = (tmp_path / "status").stat()
    assert status.st_blocks * 512 >= status.st_size > 0
