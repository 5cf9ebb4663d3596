import pathlib

import pytest

from weft.engine.wire.status_page import Status, StatusPage
from weft.server.supervise.child import Watchdog

RUNNING = Status(is_ready=1, progress_time=100.0, stall_time=110.0, num_requests_running=3)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def page(tmp_path: pathlib.Path) -> StatusPage:
    return StatusPage(tmp_path / "status")


def test_an_engine_hangs_when_it_is_silent_for_longer_than_it_said(page: StatusPage, clock: Clock) -> None:
    watchdog = Watchdog(page, clock)
    page.write(RUNNING)
    assert watchdog.wait_s() == 10.0
    clock.now = 109.0
    assert watchdog.hung() is None
    assert watchdog.wait_s() == 1.0
    clock.now = 110.1
    assert watchdog.hung() == RUNNING


def test_a_sign_of_life_puts_it_off(page: StatusPage, clock: Clock) -> None:
    watchdog = Watchdog(page, clock)
    page.write(RUNNING)
    watchdog.wait_s()
    page.write(Status(is_ready=1, progress_time=109.0, stall_time=139.0))
    clock.now = 110.1
    assert watchdog.hung() is None
    assert watchdog.wait_s() == pytest.approx(28.9)


def test_nothing_is_judged_before_the_engine_is_ready(page: StatusPage, clock: Clock) -> None:
    watchdog = Watchdog(page, clock)
    assert (watchdog.wait_s(), watchdog.hung()) == (None, None)
    page.write(Status(epoch_id=1, progress_time=1.0, loaded_bytes=5))
    assert (watchdog.wait_s(), watchdog.hung()) == (None, None)


def test_who_was_stopped_itself_lets_the_engine_begin_again(page: StatusPage, clock: Clock) -> None:
    """Ctrl-Z stops supervisor and engine. After fg, the supervisor may run first and must not kill the engine."""
    watchdog = Watchdog(page, clock)
    page.write(RUNNING)
    assert watchdog.wait_s() == 10.0
    clock.now = 400.0  # stopped meanwhile
    assert watchdog.hung() is None
    assert watchdog.wait_s() == 10.0
    clock.now = 410.0
    assert watchdog.hung() == RUNNING


def test_a_stopped_supervisor_finds_an_engine_that_went_on(page: StatusPage, clock: Clock) -> None:
    watchdog = Watchdog(page, clock)
    page.write(RUNNING)
    watchdog.wait_s()
    clock.now = 400.0
    page.write(Status(is_ready=1, progress_time=399.0, stall_time=409.0))
    assert watchdog.hung() is None
    assert watchdog.wait_s() == 10.0
