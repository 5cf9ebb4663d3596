"""A heap whose values are known by a key, so that any of them can be replaced or removed.

Removal is lazy: what is stale stays in the heap until it comes up, or until the stale are more than half of it.
Everything is O(log n), amortised.
"""

import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class IndexedHeap(Generic[K, V]):
    """Values in the order of what they are pushed with; of equal ones the first pushed comes first."""

    def __init__(self) -> None:
        """Start empty."""
        self._values: dict[K, tuple[int, V]] = {}
        self._heap: list[tuple[Any, int, K]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        """How many values there are."""
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        """Whether there is a value of that key."""
        return key in self._values

    def __iter__(self) -> Iterator[V]:
        """All values, in no order. O(n)."""
        return (value for _, value in self._values.values())

    def push(self, key: K, order: Any, value: V) -> None:
        """Put in a value; it replaces the one of the same key."""
        self._num_pushed += 1
        self._values[key] = (self._num_pushed, value)
        heapq.heappush(self._heap, (order, self._num_pushed, key))
        if len(self._heap) > 2 * len(self._values) + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Take out the value of that key, if there is one."""
        self._values.pop(key, None)

    def first(self) -> tuple[Any, V] | None:
        """The first value with its order; None if there is none."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return (self._heap[0][0], self._values[self._heap[0][2]][1]) if self._heap else None

    def _is_current(self, entry: tuple[Any, int, K]) -> bool:
        return self._values.get(entry[2], (0,))[0] == entry[1]
