"""Places for the lines that run at once. A free one goes to the batch with the fewest lines running.

So a batch gets its share however long the lines of others are. Used on one event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Hashable


class Slots:
    """A fixed number of places."""

    def __init__(self, count: int) -> None:
        """All are free."""
        self._num_free = count
        self._held: Counter[Hashable] = Counter()
        self._waiting: dict[asyncio.Future[None], Hashable] = {}  # in the order of arrival

    async def take(self, owner: Hashable) -> None:
        """Wait for a place. Whoever is cancelled meanwhile holds none."""
        place = asyncio.get_running_loop().create_future()
        self._waiting[place] = owner
        self._hand_out()
        try:
            await place
        except asyncio.CancelledError:
            if self._waiting.pop(place, None) is None:  # it came at the same moment
                self.give_back(owner)
            raise

    def give_back(self, owner: Hashable) -> None:
        """Give a place back."""
        self._num_free += 1
        self._held[owner] -= 1
        self._held += Counter()  # forgets who holds none
        self._hand_out()

    def _hand_out(self) -> None:
        while self._num_free and (waiting := [place for place in self._waiting if not place.done()]):
            place = min(waiting, key=lambda place: self._held[self._waiting[place]])  # of equals the first
            self._held[self._waiting.pop(place)] += 1
            self._num_free -= 1
            place.set_result(None)
