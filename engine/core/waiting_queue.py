"""Orders the requests that wait for admission, parks followers of a prefix, and finds expired ones.

The order is tier, priority, arrival. Every `AGE_S` seconds of waiting lift a request by a tier, so no request waits for
ever behind a higher tier. If a request needs a block that a running request is about to compute, it is parked under the
hash of that block. It is not looked at until that block is computed, or no request is about to compute it any more.
Every operation is O(log n) for each request that it concerns. None of them looks at all requests.
"""

from collections.abc import Iterator

from weft.engine.core.indexed_heap import IndexedHeap
from weft.engine.request import Request, RequestKey, RequestStatus
from weft.engine.shared.background import is_background

AGE_S = 30.0
"""Seconds of waiting that lift a request by a tier."""

_ASIDE = b""
"""Not a hash: requests parked under it are set aside for the rest of a step."""


class WaitingQueue:
    """Owner of the order of waiting requests. Mutated by the scheduler; admission parks, the KV cache manager wakes."""

    def __init__(self) -> None:
        """Start empty."""
        self._ready: IndexedHeap[RequestKey, Request] = IndexedHeap()
        self._lifts: IndexedHeap[RequestKey, Request] = IndexedHeap()  # all, by the time of their next lift
        self._deadlines: IndexedHeap[RequestKey, Request] = IndexedHeap()  # those with a deadline that never ran
        self._parked: dict[bytes, dict[RequestKey, Request]] = {}
        self._parked_under: dict[RequestKey, bytes] = {}

    def __len__(self) -> int:
        """Number of waiting requests, parked ones included."""
        return len(self._lifts)

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in order. O(n log n), for tests."""
        return iter(sorted(self._lifts, key=lambda request: request.order))

    @property
    def first(self) -> Request | None:
        """The next request among those not parked; None if there is none."""
        return first[1] if (first := self._ready.first()) else None

    def add(self, request: Request, now_s: float) -> None:
        """Add a request. Its waiting time counts from its arrival, also after it was preempted."""
        if request.deadline is not None and request.num_cached_tokens is None:
            self._deadlines.push(request.key, request.deadline, request)
        self._lift(request, max(request.num_lifts, _num_lifts(request, now_s)))
        self._ready.push(request.key, request.order, request)

    def remove(self, request: Request) -> None:
        """Remove a request, parked or not."""
        self._unpark(request)
        for heap in (self._ready, self._lifts, self._deadlines):
            heap.discard(request.key)

    def park(self, request: Request, block_hash: bytes) -> None:
        """Skip a request until `wake` is called with this hash."""
        self._ready.discard(request.key)
        self._parked_under[request.key] = block_hash
        self._parked.setdefault(block_hash, {})[request.key] = request

    def wake(self, block_hash: bytes) -> None:
        """Make the requests that are parked under this hash wait for admission again."""
        for request in self._parked.pop(block_hash, {}).values():
            del self._parked_under[request.key]
            request.status = RequestStatus.WAITING
            self._ready.push(request.key, request.order, request)

    def set_aside(self, request: Request) -> None:
        """Skip a request until `bring_back`."""
        self.park(request, _ASIDE)

    def bring_back(self) -> None:
        """Undo every `set_aside`."""
        self.wake(_ASIDE)

    def age(self, now_s: float) -> None:
        """Lift the requests that have waited long enough since their last lift."""
        while (first := self._lifts.first()) and first[0] <= now_s:
            request = first[1]
            self._lift(request, max(request.num_lifts + 1, _num_lifts(request, now_s)))
            if request.key in self._ready:
                self._ready.push(request.key, request.order, request)

    def take_expired(self, now_s: float) -> list[Request]:
        """Requests that never ran and whose deadline has passed. Each is returned once and stays in the queue."""
        expired = []
        while (first := self._deadlines.first()) and first[0] < now_s:
            expired.append(first[1])
            self._deadlines.discard(first[1].key)
        return expired

    def check_integrity(self) -> None:
        """Assert that every request is either ready or parked."""
        parked = {key: block_hash for block_hash, requests in self._parked.items() for key in requests}
        assert parked == self._parked_under
        assert not parked.keys() & {request.key for request in self._ready}
        keys = {request.key for request in self._lifts}
        assert parked.keys() | {request.key for request in self._ready} == keys
        assert {request.key for request in self._deadlines} <= keys
        assert _ASIDE not in self._parked

    def _lift(self, request: Request, num_lifts: int) -> None:
        request.num_lifts = 0 if is_background(request.priority) else num_lifts
        self._lifts.push(request.key, request.arrival_time + (num_lifts + 1) * AGE_S, request)

    def _unpark(self, request: Request) -> None:
        block_hash = self._parked_under.pop(request.key, None)
        if block_hash is not None:
            requests = self._parked[block_hash]
            del requests[request.key]
            if not requests:
                del self._parked[block_hash]


def _num_lifts(request: Request, now_s: float) -> int:
    return int((now_s - request.arrival_time) / AGE_S)
