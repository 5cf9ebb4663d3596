"""Prefixes of prompts that are reused: the hashes that name them, which are pinned, and where their states are kept.

Keys and values of all tokens stay in the cache, but of a state there is only what the last token left. A prefix can be
reused only up to a token after which the state was kept: a *stop*, at the end of a block. Prefill chunks end at stops.
Each costs a step and the memory of a state, so there are few:

- after the last full block of a prompt, for the next turn of a chat;
- where a prompt parts from another one that was or is being computed, as behind a system prompt (Pan et al., Marconi,
  2024);
- after each power of two of blocks, so that the first request that shares a prefix finds at least half of it.
"""

import hashlib
import heapq
import os
import struct
import time
from array import array
from collections.abc import Mapping, Sequence

from weft.engine.cache.block_pool import BlockPool
from weft.engine.request import Request
from weft.engine.wire.inputs import TokenSpan
from weft.engine.wire.options import Adapter

_HASH_BYTES = 16


class BlockHashes:
    """Names blocks by keyed, chained 128-bit hashes: equal hashes mean equal tokens from the first one on.

    What spans of tokens stand for is equal then, too.

    Owns the key. It is random and lives as long as the process, or as the folder that keeps evicted blocks. So nobody
    outside can make two prompts collide.
    """

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        """Take a key, or draw one; a block has block_size tokens."""
        self._block_size = block_size
        self._key = key or os.urandom(_HASH_BYTES)

    def seed(self, cache_salt: str, adapter: Adapter | None) -> bytes:
        """First parent of the chain of hashes; differs when any of the arguments does."""
        named = ("", "") if adapter is None else (f"{adapter.name},{adapter.content}", "a")
        digest = hashlib.blake2b(key=self._key, digest_size=_HASH_BYTES)
        for part in (cache_salt, *named):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()

    def extend(self, request: Request, num_blocks: int) -> None:
        """Hash the next num_blocks blocks of a request."""
        hashes, size = request.block_hashes, self._block_size
        parent, start = hashes[-1] if hashes else request.cache_seed, len(hashes) * size
        data = array("I", request.token_ids[start : start + num_blocks * size]).tobytes()
        step = size * array("I").itemsize
        for number in range(num_blocks):
            block = data[number * step : (number + 1) * step]
            if request.spans:
                block += _meant(request.spans, start + number * size, size)
            parent = hashlib.blake2b(parent + block, key=self._key, digest_size=_HASH_BYTES).digest()
            hashes.append(parent)


def _meant(spans: Sequence[TokenSpan], start: int, num_tokens: int) -> bytes:
    """What tokens from `start` on stand for: the digests of their spans, and which part of these they are."""
    touched = [span for span in spans if span.start < start + num_tokens and start < span.start + span.num_tokens]
    return b"".join(
        struct.pack("<qqq", start - span.start, span.num_tokens, len(span.digest)) + span.digest for span in touched
    )


class Pins:
    """The hashes that callers asked to pin, and until when. Owns the times and the bound on the number of hashes.

    Mutated by the KV cache manager and, as time passes, by the scheduler. The pools do the ordering: a pinned block
    that no request holds is evicted after all others, so a pin holds only while there is room. A hash may be pinned
    before its block is computed. It stays pinned even when its block is evicted.
    """

    def __init__(self, pools: Sequence[BlockPool], max_num_blocks: int) -> None:
        """Start with none; at most max_num_blocks are pinned at a time."""
        self._pools = pools
        self._max_num_blocks = max_num_blocks
        self._ends: dict[bytes, float] = {}
        self._order: list[tuple[float, bytes]] = []  # a heap, one entry for each hash, whose end may be later by now

    def __len__(self) -> int:
        """How many hashes are pinned."""
        return len(self._ends)

    def add(self, block_hashes: Sequence[bytes], end_time: float) -> None:
        """Pin the blocks of a prefix until `end_time`, on the clock of `time.monotonic`, or longer if they are already.

        Blocks for which there is no room are left out, the end of the prefix first.
        """
        self.release_expired()
        for block_hash in block_hashes:
            end = self._ends.get(block_hash)
            if end is None:
                if len(self._ends) >= self._max_num_blocks:
                    return
                for pool in self._pools:
                    pool.pin(block_hash)
                heapq.heappush(self._order, (end_time, block_hash))
            self._ends[block_hash] = max(end_time, end or end_time)

    def release_expired(self) -> None:
        """Unpin hashes whose time is over. O(1) when there are none."""
        while self._order and self._order[0][0] <= time.monotonic():
            end, block_hash = heapq.heappop(self._order)
            if self._ends[block_hash] > end:
                heapq.heappush(self._order, (self._ends[block_hash], block_hash))
            else:
                del self._ends[block_hash]
                for pool in self._pools:
                    pool.unpin(block_hash)


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
