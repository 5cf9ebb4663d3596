"""Tells the supervisor when the engine hangs, judging by the status page.

The page says until when the engine means to give its next sign of life. If the supervisor itself was stopped, probably
everything was (Ctrl-Z, a frozen container, a debugger), and an old page proves nothing: the engine then gets its whole
time again. Kills nobody.
"""

import math
import time
from collections.abc import Callable

from weft.engine.wire.status_page import Status, StatusPage

_OVERSLEPT_S = 1.0
"""Waking up this much too late means that this process was stopped."""


class Watchdog:
    """The supervisor calls `wait_s` before it sleeps and `hung` after it wakes. Times are monotonic."""

    def __init__(self, page: StatusPage, clock: Callable[[], float] = time.monotonic) -> None:
        self._page = page
        self._clock = clock
        self._due_time = math.inf  # when to look again
        self._woken_time = -math.inf  # when this process last woke much too late

    def wait_s(self) -> float | None:
        """Seconds in which the engine cannot be found hanging; None: there is no engine, or it is loading."""
        self._due_time = self._deadline(self._page.read())
        return max(self._due_time - self._clock(), 0.0) if self._due_time < math.inf else None

    def hung(self) -> Status | None:
        """The status of an engine that hangs; None if it does not."""
        now = self._clock()
        if now - self._due_time > _OVERSLEPT_S:
            self._woken_time = now
        status = self._page.read()
        return status if now >= self._deadline(status) else None

    def _deadline(self, status: Status) -> float:
        if not status.stall_time:
            return math.inf
        return max(status.stall_time, self._woken_time + status.stall_time - status.progress_time)
