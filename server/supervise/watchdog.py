"""Tells when an engine hangs, and does not take a busy machine for a hang.

The status page says until when the engine means to give its next sign of life. It cannot give one within a step, and on
a busy machine a step takes many times as long as predicted. So an engine whose time is over is looked at for as long as
its threads wait for a core or for the disk, within a bound. Whoever is stopped or waits for a lock waits for neither.
The engine itself could not judge this: whatever thread it has for it would wait for a core, too.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft.engine.wire.status_page import Status, StatusPage

_OVERSLEPT_S = 1.0
"""Waking up this much too late means that this process was stopped."""

_LOOK_S = 1.0
"""How long a look at an engine whose time is over takes."""

_HINDERED = 0.2
"""An engine whose threads together waited for a core for this share of a look is hindered."""

_MOST = 10.0
"""A silence may be so many times as long as announced. A thread that spins for ever waits for a core as well."""


@dataclass(frozen=True, slots=True)
class Hindrance:
    """What keeps a process from running.

    Attributes:
        waited_s: How long all of its threads have been ready to run and waited for a core so far.
        is_reading: Whether one of them waits for the disk at this moment.
    """

    waited_s: float = 0.0
    is_reading: bool = False


def hindrance(pid: int | None, proc: Path = Path("/proc")) -> Hindrance:
    """What the kernel counts of a process, see proc(5) and sched-stats; nothing where it counts nothing."""
    waited_ns, is_reading = 0, False
    try:
        tasks = list((proc / str(pid) / "task").iterdir())
    except OSError:  # it has ended
        return Hindrance()
    for task in tasks:
        try:
            is_reading |= (task / "stat").read_bytes().rpartition(b") ")[2].startswith(b"D")
            waited_ns += int((task / "schedstat").read_bytes().split()[1])
        except (OSError, IndexError):  # the thread has ended, or nothing is counted
            continue
    return Hindrance(waited_ns / 1e9, is_reading)


class Watchdog:
    """Judges an engine by its status page; kills nobody.

    If the supervisor itself was stopped, probably everything was (Ctrl-Z, a frozen container, a debugger), and an old
    page proves nothing: the engine then gets its whole time again. The supervisor calls `wait_s` before it sleeps and
    `hung` after it wakes. Times are monotonic.
    """

    def __init__(
        self, page: StatusPage, hindrance: Callable[[], Hindrance], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take the page of the engine, and what keeps it from running."""
        self._page = page
        self._hindrance = hindrance
        self._clock = clock
        self._due_time = math.inf  # when to look again
        self._woken_time = -math.inf  # when this process last woke much too late
        self._looked = -math.inf, Hindrance()  # when the last look began, and what was counted by then

    def wait_s(self) -> float | None:
        """Seconds in which the engine cannot be found hanging; None: there is no engine, or it is loading."""
        self._due_time = self._deadline(self._page.read())
        return max(self._due_time - self._clock(), 0.0) if self._due_time < math.inf else None

    def hung(self) -> Status | None:
        """The status of an engine that hangs; None if it does not, or is to be looked at for longer."""
        now = self._clock()
        if now - self._due_time > _OVERSLEPT_S:
            self._woken_time = now
        status = self._page.read()
        if now < self._deadline(status):
            return None
        (began, before), counted = self._looked, self._hindrance()
        self._looked = now, counted
        is_first = began < max(status.progress_time, self._woken_time)
        is_hindered = counted.is_reading or counted.waited_s - before.waited_s >= _HINDERED * (now - began)
        latest = max(status.progress_time, self._woken_time) + _MOST * (status.stall_time - status.progress_time)
        if now >= latest or not (is_first or is_hindered):
            return status
        self._page.put_off(now + _LOOK_S)
        return None

    def _deadline(self, status: Status) -> float:
        if not status.stall_time:
            return math.inf
        return max(status.stall_time, status.put_off_time, self._woken_time + status.stall_time - status.progress_time)
