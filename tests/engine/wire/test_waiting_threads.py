import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from weft.engine.wire import waiting_threads
from weft.engine.wire.waiting_threads import WaitingThreads


def test_calls_are_made_by_a_few_threads_that_stay() -> None:
    threads, names = WaitingThreads("few", 3), set[int]()

    def call(number: int) -> int:
        names.add(threading.get_ident())
        if number == 7:
            raise ValueError("seven")
        return number

    futures = [threads.submit(lambda number=number: call(number)) for number in range(100)]  # type: ignore[misc]
    assert [f.result(9) for i, f in enumerate(futures) if i != 7] == [i for i in range(100) if i != 7]
    with pytest.raises(ValueError, match="seven"):
        futures[7].result(9)
    assert len(names) <= 3


def test_one_that_hangs_keeps_its_place_and_no_other() -> None:
    threads, ends = WaitingThreads("two", 2), threading.Event()
    stuck = threads.submit(lambda: ends.wait(60))
    assert [threads.submit(lambda: 1).result(9) for _ in range(20)] == [1] * 20
    second = threads.submit(lambda: ends.wait(60))
    waiting = threads.submit(lambda: 2)
    time.sleep(0.05)
    assert not waiting.done()
    ends.set()
    assert (stuck.result(9), second.result(9), waiting.result(9)) == (True, True, 2)


def test_who_gives_up_is_forgotten_with_all_that_the_call_held() -> None:
    class Held:
        pass

    threads, ends, called = WaitingThreads("one", 1), threading.Event(), []
    threads.submit(lambda: ends.wait(60))
    held = Held()
    gone = weakref.ref(held)
    future = threads.submit(lambda held=held: called.append(held))  # type: ignore[misc]
    del held
    assert future.cancel()
    gc.collect()
    assert gone() is None
    ends.set()
    assert threads.submit(lambda: 3).result(9) == 3
    assert called == []


def test_threads_without_work_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_threads, "_IDLE_S", 0.01)
    threads = WaitingThreads("idle", 4)
    assert [f.result(9) for f in [threads.submit(lambda: time.sleep(0.02)) for _ in range(8)]] == [None] * 8
    deadline = time.monotonic() + 9
    while any(thread.name == "idle" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert threads.submit(lambda: 5).result(9) == 5


def test_a_process_ends_though_all_hang() -> None:
    code = (
        "import time; from weft.engine.wire.waiting_threads import WaitingThreads\n"
        "threads = WaitingThreads('stuck', 9)\n"
        "for _ in range(20): threads.submit(lambda: time.sleep(600))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_thread_that_cannot_start_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = WaitingThreads("few", 1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="new thread"):
                threads.submit(lambda: 1)
    assert threads.submit(lambda: 2).result(9) == 2
