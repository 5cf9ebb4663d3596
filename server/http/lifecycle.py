"""Whether this server process still takes work, and how many requests it serves at the moment.

Owned by the app (`app.state.lifecycle`), which counts requests in and out; set to draining by the process that
runs it. Draining is never taken back. Lives on one event loop; knows neither signals nor HTTP.
"""

import asyncio
from typing import Any


class Lifecycle:
    """Draining flag, and the requests between `enter` and `leave`, streams included until their last byte."""

    def __init__(self) -> None:
        self.draining = False
        self.num_active = 0
        self.unanswered: set[asyncio.Task[Any]] = set()
        """What works on requests of which no answer has begun; each task is put in and taken out by who awaits it."""
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Count a request in. Pair with `leave` in a `finally`."""
        self.num_active += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count a request out."""
        assert self.num_active > 0, "leave without enter"
        self.num_active -= 1
        if self.num_active == 0:
            self._idle.set()

    def cut(self) -> None:
        """Cancel what is unanswered."""
        for task in self.unanswered:
            task.cancel()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; False when some still are after timeout_s seconds."""
        if self.num_active == 0:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
