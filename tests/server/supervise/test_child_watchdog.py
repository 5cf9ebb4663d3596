import hashlib
import os
import pathlib
import threading
import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from weft.engine.wire.status_page import Status, StatusPage
from weft.server.supervise.child import Hindrance, Watchdog, hindrance

RUNNING = Status(is_ready=1, progress_time=100.0, stall_time=110.0, num_requests_running=3)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def hanging(watchdog: Watchdog) -> Status | None:
    """The status of an engine that hangs, without what the watchdog itself has written to it."""
    status = watchdog.hung()
    return status and replace(status, put_off_time=0.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def page(tmp_path: pathlib.Path) -> StatusPage:
    return StatusPage(tmp_path / "status")


def test_an_engine_hangs_when_it_is_silent_for_longer_than_it_said(page: StatusPage, clock: Clock) -> None:
    watchdog = Watchdog(page, Hindrance, clock)
    page.write(RUNNING)
    assert watchdog.wait_s() == 10.0
    clock.now = 109.0
    assert watchdog.hung() is None
    assert watchdog.wait_s() == 1.0
    clock.now = 110.1
    assert watchdog.hung() is None  # it may be the machine
    assert watchdog.wait_s() == pytest.approx(1.0)
    assert page.read().put_off_time == pytest.approx(111.1)
    clock.now = 111.1
    assert hanging(watchdog) == RUNNING


def test_a_sign_of_life_puts_it_off(page: StatusPage, clock: Clock) -> None:
    watchdog = Watchdog(page, Hindrance, clock)
    page.write(RUNNING)
    watchdog.wait_s()
    page.write(Status(is_ready=1, progress_time=109.0, stall_time=139.0))
    clock.now = 110.1
    assert watchdog.hung() is None
    assert watchdog.wait_s() == pytest.approx(28.9)


def test_nothing_is_judged_before_the_engine_is_ready(page: StatusPage, clock: Clock) -> None:
    watchdog = Watchdog(page, Hindrance, clock)
    assert (watchdog.wait_s(), watchdog.hung()) == (None, None)
    page.write(Status(epoch_id=1, progress_time=1.0, loaded_bytes=5))
    assert (watchdog.wait_s(), watchdog.hung()) == (None, None)


def test_who_was_stopped_itself_lets_the_engine_begin_again(page: StatusPage, clock: Clock) -> None:
    """Ctrl-Z stops supervisor and engine. After fg, the supervisor may run first and must not kill the engine."""
    watchdog = Watchdog(page, Hindrance, clock)
    page.write(RUNNING)
    assert watchdog.wait_s() == 10.0
    clock.now = 400.0  # stopped meanwhile
    assert watchdog.hung() is None
    assert watchdog.wait_s() == 10.0
    clock.now = 410.0
    assert watchdog.hung() is None
    clock.now = 411.0
    assert hanging(watchdog) == RUNNING


def test_a_stopped_supervisor_finds_an_engine_that_went_on(page: StatusPage, clock: Clock) -> None:
    watchdog = Watchdog(page, Hindrance, clock)
    page.write(RUNNING)
    watchdog.wait_s()
    clock.now = 400.0
    page.write(Status(is_ready=1, progress_time=399.0, stall_time=409.0))
    assert watchdog.hung() is None
    assert watchdog.wait_s() == 10.0


def killed_after(page: StatusPage, clock: Clock, counted: Callable[[float], Hindrance]) -> float:
    """Seconds of silence after which an engine hangs that is kept from running as `counted` says at each time."""
    watchdog = Watchdog(page, lambda: counted(clock.now), clock)
    page.write(RUNNING)
    while True:
        clock.now += watchdog.wait_s() or 0.01
        if watchdog.hung() is not None:
            return clock.now - RUNNING.progress_time


@pytest.mark.parametrize(
    ("counted", "after_s"),
    [
        (lambda now: Hindrance(), 11),
        (lambda now: Hindrance(waited_s=50.0), 11),  # before
        (lambda now: Hindrance(waited_s=0.1 * now), 11),
        (lambda now: Hindrance(waited_s=0.3 * min(now, 125.0)), 27),  # a look of which some was hindered
        (lambda now: Hindrance(is_reading=now < 131.5), 32),
        (lambda now: Hindrance(waited_s=2.0 * now), 100),  # spins for ever, on two cores that others want as well
    ],
    ids=["still", "waited", "waits little", "waited for a core", "waited for the disk", "spins"],
)
def test_a_busy_machine_is_no_hang(
    page: StatusPage, clock: Clock, counted: Callable[[float], Hindrance], after_s: float
) -> None:
    """A step of many requests in float32 was killed beside four busy loops."""
    assert killed_after(page, clock, counted) == pytest.approx(after_s, abs=1.0)


def test_requests_are_taken_while_it_is_looked_at(page: StatusPage) -> None:
    now = time.monotonic()
    page.write(Status(is_ready=1, progress_time=now - 20.0, stall_time=now - 10.0))
    assert page.read().is_stalled
    assert Watchdog(page, lambda: Hindrance(is_reading=True)).hung() is None
    assert not page.read().is_stalled
    page.write(Status(is_ready=1, progress_time=now - 20.0, stall_time=now - 10.0))
    assert page.read().is_stalled  # a sign of life counts anew


def test_the_kernel_counts_what_two_threads_on_one_core_wait() -> None:
    core, data, are_done = min(os.sched_getaffinity(0)), bytes(1 << 20), threading.Barrier(3)

    def count() -> None:
        os.sched_setaffinity(0, {core})  # of this thread alone
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            hashlib.sha256(data)  # without the interpreter's lock
        are_done.wait()

    if not pathlib.Path("/proc/self/task", str(threading.get_native_id()), "schedstat").exists():
        pytest.skip("not counted here")
    before = hindrance(os.getpid())
    for _ in range(2):
        threading.Thread(target=count, daemon=True).start()
    time.sleep(0.15)
    counted = hindrance(os.getpid())  # while both threads are there
    are_done.wait(timeout=60)
    assert counted.waited_s - before.waited_s > 0.03


def test_the_state_of_a_thread_stands_behind_its_name(tmp_path: pathlib.Path) -> None:
    for number, state in enumerate("SDR"):
        task = tmp_path / "7" / "task" / str(number)
        task.mkdir(parents=True)
        (task / "stat").write_text(f"{number} (a ) D) {state} 1 1 1")
        (task / "schedstat").write_text("5 1500000000 3")
        assert hindrance(7, tmp_path) == Hindrance(1.5 * (number + 1), number > 0)
    assert hindrance(8, tmp_path) == hindrance(None, tmp_path) == Hindrance()
