"""Gives a step longer while the machine is busy: time in which the engine's threads had no core is not silence.

The engine cannot give a sign of life within a step. So a thread of its own looks twice a second at how long the threads
of this process were ready to run and waited for a core, which the kernel counts, and adds that to the time on the
status page. A process that is stopped or waits for a lock has not waited for a core, and gets nothing.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from weft.engine.wire.status_page import Status, StatusPage

_EVERY_S = 0.5

_MOST = 10.0
"""A silence may be so many times as long as without waits. All threads count, and what spins for ever waits, too."""

_TASKS = Path("/proc/self/task")


class Patience:
    """Writes the status page for all threads of the engine process, and puts off when it counts as hung."""

    def __init__(self, page: StatusPage, waited_s: Callable[[], float] | None = None) -> None:
        """Take over the page.

        Args:
            waited_s: How long all threads together have waited for a core so far; None asks the kernel.
        """
        self._page = page
        self._waited_s = waited_s or _waited_s
        self._lock = threading.Lock()
        self._progress_time = self._last_waited_s = self._latest_time = 0.0

    def start(self) -> None:
        """Look from now on, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="patience", daemon=True).start()

    def write(self, status: Status) -> None:
        """Write the page."""
        with self._lock:
            self._page.write(status)

    def look(self) -> None:
        """Put off the time by what was waited since the last look, if there was no sign of life in between."""
        waited_s = self._waited_s()
        with self._lock:
            status = self._page.read()
            if status.progress_time != self._progress_time:
                self._progress_time = status.progress_time
                self._latest_time = status.progress_time + _MOST * (status.stall_time - status.progress_time)
            elif 0.0 < status.stall_time < self._latest_time:
                stall_time = status.stall_time + max(waited_s - self._last_waited_s, 0.0)
                self._page.write(replace(status, stall_time=min(stall_time, self._latest_time)))
        self._last_waited_s = waited_s

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(_EVERY_S):
            self.look()


def _waited_s() -> float:
    """Sum over the threads that there are now; 0 where the kernel does not count it."""
    waited_ns = 0
    for task in _TASKS.iterdir():
        try:
            waited_ns += int((task / "schedstat").read_bytes().split()[1])
        except (OSError, IndexError):  # the thread has ended, or nothing is counted
            continue
    return waited_ns / 1e9
