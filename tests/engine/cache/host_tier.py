"""A tier in the host's memory: copies of K/V by cache group and hash, of whichever cache the engine has on the CPU."""

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from weft.engine.cache.specs import CacheGroup, CacheSpec
from weft.engine.cache.tier import CachedBlock
from weft.engine.kernels.torch.caches import Caches
from weft.engine.wire.status_page import Counters


class HostTier:
    """A `BlockTier`. What is to be loaded is written by `work`, so a test says how long it takes."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, bytes], list[torch.Tensor]] = {}
        self.caches: list[list[torch.Tensor]] = []  # by group: one (num_blocks, values of a block) for each tensor
        self.pending: list[tuple[Future[None], list[tuple[CachedBlock, list[torch.Tensor]]]]] = []
        self.num_loaded = 0
        self.seconds_per_block = 0.0
        self.counters = Counters()

    def attach(self, caches: Caches, groups: Sequence[CacheGroup[CacheSpec]]) -> None:
        self.caches = [[tensor.flatten(1) for tensor in tensors] for tensors in caches.blocks(groups)]

    def keep(self, evicted: CachedBlock) -> None:
        copies = [cache[evicted.block].clone() for cache in self.caches[evicted.group]]
        self.kept[evicted.group, evicted.block_hash] = copies

    def has(self, group: int, block_hash: bytes) -> bool:
        return (group, block_hash) in self.kept

    def load_seconds(self, blocks: Sequence[tuple[int, bytes]]) -> float:
        return self.seconds_per_block * len(blocks)

    def load(self, blocks: Sequence[CachedBlock]) -> "Future[None]":
        done: Future[None] = Future()
        self.pending.append((done, [(block, self.kept[block.group, block.block_hash]) for block in blocks]))
        return done

    def seek(self, hashes: Sequence[bytes]) -> None:
        """It is not shared."""

    def forget(self, group: int, block_hash: bytes) -> None:
        self.kept.pop((group, block_hash), None)

    def work(self) -> None:
        """Write all that is to be loaded."""
        for done, blocks in self.pending:
            for (group, _, block), copies in blocks:
                for cache, copy in zip(self.caches[group], copies, strict=True):
                    cache[block] = copy
                self.num_loaded += 1
            done.set_result(None)
        self.pending = []

    def break_down(self) -> None:
        """Lose all that is kept, and fail what is to be loaded."""
        self.kept = {}
        for done, _ in self.pending:
            done.set_exception(OSError("the tier broke down"))
        self.pending = []
