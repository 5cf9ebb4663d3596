"""Tells the supervisor when the engine hangs, as the status page has it.

The page says until when the engine means to give its next sign of life. A supervisor that was stopped itself, probably
with everything else (Ctrl-Z, a frozen container, a debugger), finds an old page that proves nothing: then the engine
gets its whole time again. Kills nobody.
"""

import math
import time
from collections.abc import Callable

from weft.engine.shared.status_page import Status, StatusPage

_OVERSLEPT_S = 1.0
"""Who wakes so much later than meant was stopped."""


class Watchdog:
    """Asked by the supervisor's loop alone: `wait_s` before it sleeps, `hung` when it wakes. Times are monotonic."""

    def __init__(self, page: StatusPage, clock: Callable[[], float] = time.monotonic) -> None:
        self._page = page
        self._clock = clock
        self._due_time = math.inf  # when to look again
        self._woken_time = -math.inf  # when that was much too late, for the last time

    def wait_s(self) -> float | None:
        """How long nobody needs to look; None while there is nothing to see: no engine, or one that loads."""
        status = self._page.read()
        self._due_time = self._deadline(status)
        return max(self._due_time - self._clock(), 0.0) if self._due_time < math.inf else None

    def hung(self) -> Status | None:
        """What the page says of an engine that hangs; None if none does."""
        now = self._clock()
        if now - self._due_time > _OVERSLEPT_S:
            self._woken_time = now
        status = self._page.read()
        return status if now >= self._deadline(status) else None

    def _deadline(self, status: Status) -> float:
        if not status.stall_time:
            return math.inf
        return max(status.stall_time, self._woken_time + status.stall_time - status.progress_time)
