"""Threads for calls that may wait for ever, such as for a disk that hangs: a few at a time, and none holds up the end.

Nothing can end a thread that waits for a disk. So nobody waits for it: who has called gives up after a time, the thread
keeps its place until the disk answers, and the process ends without it (Python's own pools wait for their threads). All
places may hang; then what is called waits for one, and its caller gives up, too. Imports neither side.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_IDLE_S = 10.0
"""A thread without work ends after this time."""


class WaitingThreads:
    """Calls functions in at most so many threads, in the order in which they come. Any thread may use it."""

    def __init__(self, name: str, max_num: int) -> None:
        """Threads start when they are needed."""
        self._name, self._max_num = name, max_num
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._num = self._num_idle = 0

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Call a function. To cancel the future keeps what has not begun from being called, and forgets it.

        Raises:
            RuntimeError: No thread can be started for it.
        """
        future: Future[T] = Future()
        with self._changed:
            self._calls.append((future, function))
            if len(self._calls) <= self._num_idle:
                self._changed.notify()
            elif self._num < self._max_num:
                self._num += 1
                try:
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
                except BaseException:  # there is no memory for it, or too many threads
                    self._num -= 1
                    self._calls.pop()
                    raise
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: "Future[Any]") -> None:
        if future.cancelled():
            with self._changed:
                self._calls = deque(call for call in self._calls if call[0] is not future)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            future, function = call
            del call
            if future.set_running_or_notify_cancel():
                try:
                    result = function()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del future, function  # nothing of it is held while this waits for the next

    def _next(self) -> tuple["Future[Any]", Callable[[], Any]] | None:
        """The next call; None if there is none for a while, in which case this thread is no longer counted."""
        with self._changed:
            self._num_idle += 1
            has_call = self._changed.wait_for(lambda: self._calls, _IDLE_S)
            self._num_idle -= 1
            if has_call:
                return self._calls.popleft()
            self._num -= 1
            return None
