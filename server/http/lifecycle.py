"""Whether a server process still takes requests, and how many it is serving.

Owned by the app (`app.state.lifecycle`), which counts requests in and out. The process sets `draining`, which is never
reset. Lives on one event loop; knows neither signals nor HTTP.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class Lifecycle:
    """The draining flag, and the number of requests; a stream counts until its last byte."""

    def __init__(self) -> None:
        self.draining = False
        self.num_active = 0
        self.unanswered: set[asyncio.Task[Any]] = set()
        """Tasks of requests whose answer has not begun. Whoever awaits a task adds and removes it."""
        self.background: dict[str, Callable[[], Awaitable[None]]] = {}
        """How to end each response that outlives its request, by its id. Whoever starts one counts it in and out."""
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
        """Cancel the requests whose answer has not begun."""
        for task in self.unanswered:
            task.cancel()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is being served; False if some still are after timeout_s seconds."""
        if self.num_active == 0:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
