"""Requests that wait to be admitted: who is next, who waits for another's prefix, whose time is over.

Order is tier, priority and arrival, and waiting counts: every `AGE_S` seconds lift a request by a tier, so nobody waits
for ever behind those of a tier above. Who needs a block that a running request is about to compute is parked under its
hash, and not looked at before that block is there or nobody computes it any more. Every operation is O(log n) for each
request that it concerns; nothing here looks at all of them.
"""

from collections.abc import Iterator

from weft.engine.core.indexed_heap import IndexedHeap
from weft.engine.core.request import Request, RequestKey, RequestStatus

AGE_S = 30.0
"""Seconds of waiting that lift a request by a tier."""

_ASIDE = b""
"""Stands for no hash: set aside for the rest of a step."""


class WaitingQueue:
    """Owner of the order of waiting requests. Mutated by the scheduler; admission parks, the KV cache manager wakes."""

    def __init__(self) -> None:
        """Start with nobody."""
        self._ready: IndexedHeap[RequestKey, Request] = IndexedHeap()
        self._lifts: IndexedHeap[RequestKey, Request] = IndexedHeap()  # everybody, by the time of the next lift
        self._deadlines: IndexedHeap[RequestKey, Request] = IndexedHeap()  # who has one and never ran
        self._parked: dict[bytes, dict[RequestKey, Request]] = {}
        self._parked_under: dict[RequestKey, bytes] = {}

    def __len__(self) -> int:
        """How many wait, parked ones included."""
        return len(self._lifts)

    def __iter__(self) -> Iterator[Request]:
        """All of them, in order. O(n log n), for tests."""
        return iter(sorted(self._lifts, key=lambda request: request.order))

    @property
    def first(self) -> Request | None:
        """Who is next among those that are not parked; None if all are."""
        first = self._ready.first()
        return first[1] if first else None

    def add(self, request: Request, now_s: float) -> None:
        """Let a request wait; how long it has been there since its arrival counts, also when it is preempted."""
        if request.deadline is not None and request.num_cached_tokens is None:
            self._deadlines.push(request.key, request.deadline, request)
        self._lift(request, max(request.num_lifts, _num_lifts(request, now_s)))
        self._ready.push(request.key, request.order, request)

    def remove(self, request: Request) -> None:
        """Let a request go, parked or not."""
        self._unpark(request)
        for heap in (self._ready, self._lifts, self._deadlines):
            heap.discard(request.key)

    def park(self, request: Request, block_hash: bytes) -> None:
        """Pass a request over until `wake` is called with this hash."""
        self._ready.discard(request.key)
        self._parked_under[request.key] = block_hash
        self._parked.setdefault(block_hash, {})[request.key] = request

    def wake(self, block_hash: bytes) -> None:
        """Let those wait for admission again who are parked under this hash."""
        for request in self._parked.pop(block_hash, {}).values():
            del self._parked_under[request.key]
            request.status = RequestStatus.WAITING
            self._ready.push(request.key, request.order, request)

    def set_aside(self, request: Request) -> None:
        """Pass a request over until `bring_back`."""
        self.park(request, _ASIDE)

    def bring_back(self) -> None:
        """Undo every `set_aside`."""
        self.wake(_ASIDE)

    def age(self, now_s: float) -> None:
        """Lift those that have waited long enough since they were lifted last."""
        while (first := self._lifts.first()) and first[0] <= now_s:
            request = first[1]
            self._lift(request, max(request.num_lifts + 1, _num_lifts(request, now_s)))
            if request.key in self._ready:
                self._ready.push(request.key, request.order, request)

    def take_expired(self, now_s: float) -> list[Request]:
        """Those that never ran and whose deadline has passed, each once; they stay in the queue."""
        expired = []
        while (first := self._deadlines.first()) and first[0] < now_s:
            expired.append(first[1])
            self._deadlines.discard(first[1].key)
        return expired

    def check_integrity(self) -> None:
        """Assert that everybody is either ready or parked."""
        parked = {key: block_hash for block_hash, requests in self._parked.items() for key in requests}
        assert parked == self._parked_under
        assert not parked.keys() & {request.key for request in self._ready}
        keys = {request.key for request in self._lifts}
        assert parked.keys() | {request.key for request in self._ready} == keys
        assert {request.key for request in self._deadlines} <= keys
        assert _ASIDE not in self._parked

    def _lift(self, request: Request, num_lifts: int) -> None:
        request.num_lifts = num_lifts
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
