"""Says whose picture is read next. One is read at a time, and each request has at most one that waits.

A turn goes to the API key that had one the longest ago, and among its requests to the one that came first. So requests
alternate, however many pictures each has, and so do keys, however many requests each sends.
"""

import asyncio
from collections import Counter
from typing import Final

from weft.server.errors import EngineUnavailableError, QueueFullError

MAX_WAITING: Final = 256
"""Of requests. One key has at most as many as there are places left."""
TURN_S: Final = 300.0
"""How long a turn is waited for."""


class Turns:
    """Used on one event loop."""

    def __init__(self) -> None:
        """Nobody has a turn."""
        self._waiting = dict[asyncio.Future[None], str]()  # with their tenants, in the order of arrival
        self._num_given = 0
        self._last = Counter[str]()  # by tenant, the number of its last turn
        self._is_taken = False

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
        self._hand_on()
        try:
            async with asyncio.timeout(TURN_S):
                await place
        except BaseException as error:
            if self._waiting.pop(place, None) is None and not place.cancelled() and place.exception() is None:
                self.give_back()  # it came at the same moment
            if isinstance(error, TimeoutError):
                raise QueueFullError(f"the pictures could not be read within {TURN_S:g} s") from None
            raise

    def give_back(self) -> None:
        """End a turn."""
        self._is_taken = False
        self._hand_on()

    def end(self) -> None:
        """Let all who wait fail: the engine has gone."""
        waiting, self._waiting = self._waiting, {}
        for place in waiting:
            if not place.done():
                place.set_exception(EngineUnavailableError())

    def _hand_on(self) -> None:
        waiting = [place for place in self._waiting if not place.done()]
        if waiting and not self._is_taken:
            place = min(waiting, key=lambda place: self._last[self._waiting[place]])  # of equals the first
            self._num_given += 1
            self._last[self._waiting.pop(place)] = self._num_given
            self._is_taken = True
            place.set_result(None)
