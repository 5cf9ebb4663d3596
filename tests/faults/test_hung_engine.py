"""An engine that hangs: SIGSTOP stands for a stuck kernel."""

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from tests.end_to_end.conftest import ENGINE, SERVER, LiveServer, serving
from tests.end_to_end.test_life_and_death import LONG, Stream, complete, eventually


@pytest.fixture(scope="module")
def stall_s(is_long: bool) -> float:
    """After how much silence the engine is taken to hang; in the long form that is what short steps allow."""
    return 10.0 if is_long else 5.0


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, long_model: str, stall_s: float, is_long: bool
) -> Iterator[LiveServer]:
    setting = {} if is_long else {"WEFT_STALL_TIMEOUT_S": str(stall_s)}
    with serving(tmp_path_factory.mktemp("hung") / "log", long_model, **setting) as server:
        yield server


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def test_a_stop_of_everything_is_no_hang(server: LiveServer, stall_s: float) -> None:
    """Ctrl-Z and fg: whoever wakes first finds an old status page."""
    pids = [
        server.process.pid,
        *server.children(ENGINE),
        *server.children(SERVER),
    ]
    for pid in pids:
        stop(pid)
    time.sleep(stall_s + 1.5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)
    server.wait_ready()
    assert complete(server).status_code == 200
    assert [
        server.process.pid,
        *server.children(ENGINE),
        *server.children(SERVER),
    ] == pids


def test_an_engine_that_hangs_is_replaced_and_its_requests_are_told(server: LiveServer, stall_s: float) -> None:
    """It was left as it was: streams hung, new requests hung with them, and the log said nothing."""
    stream = Stream(server, **LONG)
    (engine,) = server.children(ENGINE)
    stop(engine)
    text = stream.wait()
    assert '"code":"engine_restarting"' in text
    assert text.endswith("data: [DONE]\n\n")
    server.wait_ready()
    assert complete(server).status_code == 200
    assert server.children(ENGINE) != [engine]
    (line,) = [line for line in server.log.read_text().splitlines() if "The engine hangs" in line]
    told = re.search(r"no sign of life for (\d+) s, with 1 requests running and 0 waiting; killing it", line)
    assert told and int(told[1]) >= stall_s


def test_an_idle_engine_that_hangs_is_ended_before_anybody_asks(server: LiveServer) -> None:
    """It was ready until the first request, which hung."""
    (engine,) = server.children(ENGINE)
    stop(engine)
    eventually(lambda: engine not in server.children(ENGINE), "it is not ended")
    assert "with 0 requests running and 0 waiting; killing it" in server.log.read_text()
