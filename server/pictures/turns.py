"""Says whose picture is read next. Few are at once, and each request has at most one that waits.

A turn goes to the API key whose pictures have taken the least time, and among its requests to the one that came first.
So requests alternate, however many pictures each has, and keys share the time, whatever each sends. Who comes after a
while has no more than the others by that: it counts from where the last turn was given.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Final

from weft.server.errors import EngineUnavailableError, QueueFullError

MAX_WAITING: Final = 256
"""Of requests. One key has at most as many as there are places left."""
TURN_S: Final = 300.0
"""How long a turn is waited for."""


class Turns:
    """Used on one event loop."""

    def __init__(self, num_at_once: int = 1) -> None:
        """Nobody has a turn."""
        self._num_left = num_at_once
        self._waiting = dict[asyncio.Future[None], str]()  # with their tenants, in the order of arrival
        self._used = defaultdict[str, float](float)  # seconds, by tenant
        self._now = 0.0  # of these, what the last one had who was given a turn

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Have a turn meanwhile; raises as `take` does."""
        await self.take(tenant)
        began = time.monotonic()
        try:
            yield
        finally:
            self.give_back(tenant, time.monotonic() - began)

    async def take(self, tenant: str) -> None:
        """Wait for a turn. Whoever is cancelled meanwhile has none.

        Raises:
            QueueFullError: Too many wait, or it takes too long.
            EngineUnavailableError: The engine has gone.
        """
        num_own, num_left = list(self._waiting.values()).count(tenant), MAX_WAITING - len(self._waiting)
        if num_own >= num_left:
            bound = f"at most {MAX_WAITING} requests wait until their pictures are read"
            raise QueueFullError(f"{bound}, and one key has at most as many as are left; try again in a moment")
        place = asyncio.get_running_loop().create_future()
        self._waiting[place] = tenant
        self._used[tenant] = max(self._used[tenant], self._now)
        self._hand_on()
        try:
            async with asyncio.timeout(TURN_S):
                await place
        except BaseException as error:
            if self._waiting.pop(place, None) is None and not place.cancelled() and place.exception() is None:
                self.give_back(tenant, 0.0)  # it came at the same moment
            if isinstance(error, TimeoutError):
                raise QueueFullError(f"the pictures could not be read within {TURN_S:g} s") from None
            raise

    def give_back(self, tenant: str, seconds: float) -> None:
        """End a turn that took so long."""
        self._used[tenant] += seconds
        self._num_left += 1
        self._hand_on()

    def end(self) -> None:
        """Let all who wait fail: the engine has gone."""
        waiting, self._waiting = self._waiting, {}
        for place in waiting:
            if not place.done():
                place.set_exception(EngineUnavailableError())

    def _hand_on(self) -> None:
        waiting = [place for place in self._waiting if not place.done()]
        if waiting and self._num_left:
            place = min(waiting, key=lambda place: self._used[self._waiting[place]])  # of equals the first
            self._now = max(self._now, self._used[self._waiting.pop(place)])
            self._num_left -= 1
            place.set_result(None)
