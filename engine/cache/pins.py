"""Keeps the prefixes that callers asked to pin: which block hashes, and until when.

A pinned block that no request holds is evicted after all others, so a pin holds only while there is room. Owns the
times and the bound on the number of pinned hashes. The pools do the ordering. A hash may be pinned before its block is
computed. It stays pinned even when its block is evicted.
"""

import heapq
import time
from collections.abc import Sequence

from weft.engine.cache.block_pool import BlockPool


class Pins:
    """Pinned hashes with their times. Mutated by the KV cache manager and, as time passes, by the scheduler."""

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
