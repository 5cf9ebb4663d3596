"""Which waiting request is next, and how much of it is cached, found out in slices.

Hashing long prompts, and looking their blocks up, must not hold up those that run: while anything does, a step looks at
a bounded number of blocks, and goes on in the next. Who follows another's prompt is parked as soon as that shows.
"""

from collections.abc import Iterator

from weft.engine.cache.manager import KVCacheManager
from weft.engine.core.request import Request, RequestStatus
from weft.engine.core.waiting_queue import WaitingQueue

BLOCKS_PER_STEP = 4096
"""Blocks of waiting prompts that are hashed or found between two steps while something runs: about 10 ms."""

FIRST_HASHES = 32
"""Blocks of a prompt that are hashed at first, then as many again: who is to wait for another is told apart early."""


def candidates(waiting: WaitingQueue, kv: KVCacheManager, running: list[Request]) -> Iterator[tuple[Request, int]]:
    """Waiting requests in order, each with the number of its cached tokens; the next one once the caller admits it."""
    num_blocks = BLOCKS_PER_STEP
    while (request := waiting.first) is not None:
        if running and (num_blocks <= 0 or must_wait_alone(request, running)):
            return  # whoever must run alone is not overtaken, or it would wait for ever under load
        if request.num_placeholders:  # ids of it are on their way
            waiting.set_aside(request)
            continue
        num_blocks -= _hash_slice(request, kv, is_bounded=bool(running))
        num_cached_tokens = kv.find_prefix(request)
        num_blocks -= num_cached_tokens // kv.block_size
        awaited_hash = kv.awaited_hash(request, num_cached_tokens)
        if awaited_hash is not None:
            waiting.park(request, awaited_hash)
        elif not kv.num_unhashed_blocks(request):
            loaded_hash = kv.bring_back(request)
            if loaded_hash is None:
                yield request, num_cached_tokens
            else:
                waiting.park(request, loaded_hash)
                request.status = RequestStatus.LOADING


def must_wait_alone(request: Request, running: list[Request]) -> bool:
    """Whether the request must not run beside those that run now, though it may beside its own choices."""
    return bool(running) and (request.runs_alone or running[0].runs_alone)


def _hash_slice(request: Request, kv: KVCacheManager, *, is_bounded: bool) -> int:
    """Hash some more blocks of a request, if it lacks any; returns how many."""
    num_before = len(request.block_hashes)
    num_blocks = max(num_before, FIRST_HASHES)
    kv.hash_blocks(request, min(num_blocks, BLOCKS_PER_STEP) if is_bounded else num_blocks)
    return len(request.block_hashes) - num_before
