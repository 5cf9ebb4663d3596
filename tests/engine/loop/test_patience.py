"""A busy machine is no hang, and a hang is one on any machine."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.engine.loop.patience import Patience, _waited_s
from weft.engine.wire.status_page import Status, StatusPage


@pytest.fixture
def page(tmp_path: Path) -> Iterator[StatusPage]:
    page = StatusPage(tmp_path / "status")
    yield page
    page.close()


def looks(page: StatusPage, waits: list[float], *, progress: bool = False, stall_time: float = 110.0) -> list[float]:
    """The time on the page after each look, the first of which only begins to count."""
    counted = iter([5.0, *(5.0 + sum(waits[: n + 1]) for n in range(len(waits)))])
    patience = Patience(page, lambda: next(counted))
    patience.write(Status(progress_time=100.0, stall_time=stall_time))
    patience.look()
    times = []
    for number in range(len(waits)):
        if progress:
            patience.write(Status(progress_time=101.0 + number, stall_time=stall_time + 1 + number))
        patience.look()
        times.append(page.read().stall_time)
    return times


def test_time_without_a_core_is_no_silence(page: StatusPage) -> None:
    """A step of many requests in float32 was killed beside four busy loops."""
    assert looks(page, [0.4, 0.5, 0.0]) == pytest.approx([110.4, 110.9, 110.9])


def test_a_process_that_waits_for_no_core_gets_nothing(page: StatusPage) -> None:
    assert looks(page, [0.0, 0.0]) == [110.0, 110.0]


def test_a_silence_is_bounded(page: StatusPage) -> None:
    assert looks(page, [60.0, 60.0, 60.0]) == [170.0, 200.0, 200.0]


def test_a_sign_of_life_begins_anew(page: StatusPage) -> None:
    assert looks(page, [5.0, 5.0], progress=True) == [111.0, 112.0]


def test_nobody_is_judged_without_a_limit(page: StatusPage) -> None:
    assert looks(page, [5.0], stall_time=0.0) == [0.0]


def test_threads_that_end_take_their_waits_with_them(page: StatusPage) -> None:
    assert looks(page, [5.0, -3.0, 1.0]) == pytest.approx([115.0, 115.0, 116.0])


def test_the_kernel_counts_what_two_threads_on_one_core_wait() -> None:
    core, data, are_done = min(os.sched_getaffinity(0)), bytes(1 << 20), threading.Barrier(3)

    def count() -> None:
        os.sched_setaffinity(0, {core})  # of this thread alone
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            hashlib.sha256(data)  # without the interpreter's lock
        are_done.wait()

    if not Path("/proc/self/task", str(threading.get_native_id()), "schedstat").exists():
        pytest.skip("not counted here")
    before = _waited_s()
    for _ in range(2):
        threading.Thread(target=count, daemon=True).start()
    time.sleep(0.15)
    waited_s = _waited_s() - before  # while both threads are there
    are_done.wait(timeout=60)
    assert waited_s > 0.03
