"""A heap with keys, so that any value can be replaced or removed.

Removal is lazy. A stale entry stays in the heap until it reaches the top, or until more than half of the heap is stale.
Operations are O(log n), amortised.
"""

import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class IndexedHeap(Generic[K, V]):
    """Values sorted by the order that `push` was given. Of equals, the first pushed comes first."""

    def __init__(self) -> None:
        """Start empty."""
        self._values: dict[K, tuple[int, V]] = {}
        self._heap: list[tuple[Any, int, K]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        """Number of values."""
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        """Whether the key has a value."""
        return key in self._values

    def __iter__(self) -> Iterator[V]:
        """All values, unsorted. O(n)."""
        return (value for _, value in self._values.values())

    def push(self, key: K, order: Any, value: V) -> None:
        """Add a value; it replaces the value of the same key."""
        self._num_pushed += 1
        self._values[key] = (self._num_pushed, value)
        heapq.heappush(self._heap, (order, self._num_pushed, key))
        if len(self._heap) > 2 * len(self._values) + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Remove the value of the key, if it has one."""
        self._values.pop(key, None)

    def first(self) -> tuple[Any, V] | None:
        """The order and the value of the first entry; None if the heap is empty."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return (self._heap[0][0], self._values[self._heap[0][2]][1]) if self._heap else None

    def _is_current(self, entry: tuple[Any, int, K]) -> bool:
        return self._values.get(entry[2], (0,))[0] == entry[1]
