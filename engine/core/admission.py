"""Picks the next waiting request and finds how much of its prompt is cached.

Hashing a long prompt and looking up its blocks must not delay running requests. So while anything runs, a step looks at
a bounded number of blocks, and the next step continues there. A request whose prefix another one is about to compute is
parked as soon as that shows.
"""

from collections.abc import Iterator

from weft.engine.cache.manager import KVCacheManager
from weft.engine.core.background import gives_way
from weft.engine.core.waiting_queue import WaitingQueue
from weft.engine.request import Request

BLOCKS_PER_STEP = 4096
"""Most blocks of waiting prompts that are hashed or found between two steps while something runs: about 10 ms."""

FIRST_HASHES = 32
"""Blocks of a prompt hashed at first. Each later slice doubles them, so a request that must wait shows early."""


def candidates(waiting: WaitingQueue, kv: KVCacheManager, running: list[Request]) -> Iterator[tuple[Request, int]]:
    """Yield waiting requests in order, each with its cached tokens; the next once the caller admits or parks it."""
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


def must_wait_alone(request: Request, running: list[Request]) -> bool:
    """Whether the request must wait because it, or what runs now, runs alone, or because it gives way to what runs.

    Its own choices may run beside it.
    """
    return bool(running) and (request.runs_alone or running[0].runs_alone or gives_way(request, running[0]))


def _hash_slice(request: Request, kv: KVCacheManager, *, is_bounded: bool) -> int:
    """Hash the next slice of a request's blocks; return how many were hashed."""
    num_before = len(request.block_hashes)
    num_blocks = max(num_before, FIRST_HASHES)
    kv.hash_blocks(request, min(num_blocks, BLOCKS_PER_STEP) if is_bounded else num_blocks)
    return len(request.block_hashes) - num_before
