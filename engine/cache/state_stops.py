"""Says after which tokens of a request its states are kept, so that later requests begin there.

Keys and values of all tokens stay in the cache, but of a state there is only what the last token left. A prefix can be
reused only up to a token after which the state was kept: a *stop*, at the end of a block. Prefill chunks end at stops.
Each costs a step and the memory of a state, so there are few:

- after the last full block of a prompt, for the next turn of a chat;
- where a prompt parts from another one that was or is being computed, as behind a system prompt (Pan et al., Marconi,
  2024);
- after each power of two of blocks, so that the first request that shares a prefix finds at least half of it.
"""

from collections.abc import Mapping

from weft.engine.request import Request

LEAST_TOKENS = 256
"""Fewest tokens that a stop saves. To compute them takes about as long as the step that the stop costs: on a GPU both
read all weights once."""


def next_stop(request: Request, start: int, block_size: int, least_tokens: int) -> int:
    """The first stop of a request behind start."""
    power = block_size
    while power <= start or power < least_tokens:
        power *= 2
    return min([power, *(stop for stop in request.state_stops if stop > start)])


def is_stop(request: Request, num_tokens: int, block_size: int, least_tokens: int) -> bool:
    """Whether the states after the first num_tokens tokens, at the end of a block, are kept."""
    return next_stop(request, num_tokens - 1, block_size, least_tokens) == num_tokens


def stops_of(
    request: Request, num_shared_blocks: int, num_cached_tokens: int, block_size: int, least_tokens: int
) -> set[int]:
    """The stops of a request beside powers of two; num_shared_blocks of its prompt were computed for others."""
    ends = [
        request.num_prompt_tokens - 1,
        num_shared_blocks * block_size,
        *(p.num_tokens for p in request.caching.pins),
    ]
    stops = {end // block_size * block_size for end in ends}
    return {stop for stop in stops if stop - num_cached_tokens >= least_tokens}


def awaited_stop(
    request: Request, leaders: Mapping[bytes, Request], num_cached_tokens: int, block_size: int, least_tokens: int
) -> bytes | None:
    """Hash of the last block that a hashed request should wait for; asks the request that computes it to stop there.

    None if it is not worth it, or too late. The blocks before it are computed by the same request, or were.
    """
    hashes = request.block_hashes[: (request.num_tokens - 1) // block_size]
    for num_blocks in range(len(hashes), num_cached_tokens // block_size, -1):
        leader, stop = leaders.get(hashes[num_blocks - 1]), num_blocks * block_size
        if leader is not None:
            if stop - num_cached_tokens < least_tokens or stop < leader.num_computed_tokens:
                return None
            leader.state_stops.add(stop)
            return hashes[num_blocks - 1]
    return None
