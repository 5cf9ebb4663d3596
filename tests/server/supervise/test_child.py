import os
import signal
import time
from types import SimpleNamespace

import pytest

from weft.server.supervise import child
from weft.server.supervise.child import Child


def wait_end(process: Child) -> int:
    deadline = time.monotonic() + 60
    while (code := process.reap()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return code


def test_early_deaths_delay_the_next_start_more_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=lambda: 100.0))  # no life is longer than another
    process = Child("x", ["/bin/sh", "-c", "exit 3"], {})
    delays: list[float] = []
    for _ in range(9):
        process.start()
        assert process.due_time is None
        assert wait_end(process) == 3
        assert process.due_time is not None
        delays.append(process.due_time - 100.0)
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    monkeypatch.setattr(child, "STEADY_S", 0.0)  # now every life counts as long
    process.start()
    wait_end(process)
    assert process.due_time == 100.0


def test_signals_reach_it_and_are_not_blocked_in_it() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        process = Child("x", ["/bin/sleep", "60"], {})
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    process.send_signal(signal.SIGINT)  # ignored
    time.sleep(0.05)
    assert process.reap() is None
    process.send_signal(signal.SIGTERM)
    assert wait_end(process) == -signal.SIGTERM


def test_kill_waits_for_the_end() -> None:
    process = Child("x", ["/bin/sleep", "60"], {})
    process.kill()  # nothing runs yet
    process.start()
    pid = process.pid
    assert pid is not None
    process.kill()
    assert process.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
