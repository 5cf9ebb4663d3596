"""Orders the requests that wait for admission, and finds the next one that may run and those that give way.

`WaitingQueue` has the order: tier, priority, arrival. `candidates` picks the next waiting request and finds how much of
its prompt is cached. Background requests wait, or are preempted (`in_the_way`), while any other request runs or waits.
`LiveRequests` has all unfinished requests by key, running ones too.
"""

import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

from weft.engine.cache.manager import KVCacheManager
from weft.engine.request import Request, RequestKey, RequestStatus
from weft.engine.wire.params import is_background

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class IndexedHeap(Generic[K, V]):
    """A heap with keys: values sorted by the order that `push` was given. Of equals, the first pushed comes first.

    Any value can be replaced or removed. Removal is lazy. A stale entry stays in the heap until it reaches the top, or
    until more than half of the heap is stale. Operations are O(log n), amortised.
    """

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


AGE_S = 30.0
"""Seconds of waiting that lift a request by a tier."""

_ASIDE = b""
"""Not a hash: requests parked under it are set aside for the rest of a step."""


class WaitingQueue:
    """Owner of the order of waiting requests. Mutated by the scheduler; `candidates` parks, the KV cache manager wakes.

    The order is tier, priority, arrival. Every `AGE_S` seconds of waiting lift a request by a tier, so no request waits
    for ever behind a higher tier. If a request needs a block that a running request is about to compute, it is parked
    under the hash of that block. It is not looked at until that block is computed, or no request is about to compute it
    any more. Every operation is O(log n) for each request that it concerns. None of them looks at all requests.
    """

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


BLOCKS_PER_STEP = 4096
"""Most blocks of waiting prompts that are hashed or found between two steps while something runs: about 10 ms."""

FIRST_HASHES = 32
"""Blocks of a prompt hashed at first. Each later slice doubles them, so a request that must wait shows early."""


def candidates(waiting: WaitingQueue, kv: KVCacheManager, running: list[Request]) -> Iterator[tuple[Request, int]]:
    """Yield waiting requests in order, each with its cached tokens; the next once the caller admits or parks it.

    Hashing a long prompt and looking up its blocks must not delay running requests. So while anything runs, a step
    looks at a bounded number of blocks, and the next step continues there. A request whose prefix another one is about
    to compute is parked as soon as that shows.
    """
    num_blocks = BLOCKS_PER_STEP
    while (request := waiting.first) is not None:
        if running and (num_blocks <= 0 or must_wait_alone(request, running)):
            return  # a request that must run alone is not overtaken: under load it would wait for ever
        if request.num_placeholders:  # some of its ids are not on the host yet
            waiting.set_aside(request)
            continue
        num_blocks -= _hash_slice(request, kv, is_bounded=bool(running))
        num_cached_tokens = kv.find_prefix(request)
        num_blocks -= num_cached_tokens // kv.block_size
        awaited_hash = kv.awaited_hash(request, num_cached_tokens)
        if awaited_hash is not None:
            waiting.park(request, awaited_hash)
        elif not kv.num_unhashed_blocks(request):
            yield request, num_cached_tokens


def _hash_slice(request: Request, kv: KVCacheManager, *, is_bounded: bool) -> int:
    """Hash the next slice of a request's blocks; return how many were hashed."""
    num_before = len(request.block_hashes)
    num_blocks = max(num_before, FIRST_HASHES)
    kv.hash_blocks(request, min(num_blocks, BLOCKS_PER_STEP) if is_bounded else num_blocks)
    return len(request.block_hashes) - num_before


def must_wait_alone(request: Request, running: list[Request]) -> bool:
    """Whether the request must wait because it, or what runs now, runs alone, or because it gives way to what runs.

    Its own choices may run beside it.
    """
    return bool(running) and (request.runs_alone or running[0].runs_alone or gives_way(request, running[0]))


def in_the_way(running: list[Request], waiting: WaitingQueue) -> list[Request]:
    """The background requests to preempt, because another request runs or waits. `running` is in order.

    One without tokens to compute ends with the launched steps.
    """
    others = [request for request in (*running[:1], waiting.first) if request is not None]
    if not running or not any(gives_way(running[-1], other) for other in others):
        return []
    return [r for r in running if is_background(r.priority) and r.num_new_tokens > 0]


def gives_way(request: Request, other: Request) -> bool:
    """Whether a request must not compute beside another one."""
    return is_background(request.priority) and not is_background(other.priority)
