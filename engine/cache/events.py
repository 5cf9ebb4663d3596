"""Tells routers which blocks became cached and which no longer are, so that they send prompts where their prefix is.

`RecordingCache` records events, and `EventPublisher` sends them. Events have the fields and the order of vLLM's.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Literal

import msgspec
from typing_extensions import override

from weft.engine.cache.block_pool import BlockPool
from weft.engine.cache.manager import KVCacheManager
from weft.engine.cache.prefixes import BlockHashes
from weft.engine.request import Request


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Blocks that follow each other, and whose content is cached now.

    Attributes:
        parent_block_hash: Of the block before the first; None at the beginning of a prompt.
        token_ids: Of all these blocks.
        lora_name: Of the adapter that made them; None: the model itself.
        medium: The first tier in vLLM's words, whatever the device.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: Literal["GPU"] = "GPU"
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """Blocks whose content is cached no longer."""

    block_hashes: list[int]
    medium: Literal["GPU"] = "GPU"


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """Nothing is cached."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class RecordingPool(BlockPool):
    """A pool that tells which content is no longer found."""

    on_unindex: Callable[[bytes], object] | None = None

    @override
    def unindex(self, block: int) -> None:
        block_hash = self._hashes[block]
        super().unindex(block)
        if block_hash is not None and self.on_unindex is not None:
            self.on_unindex(block_hash)


class BlockEvents:
    """Owner of the events of one pool since they were last taken.

    Only blocks of requests without a salt are recorded: an event holds the token ids of its block, and a salt says that
    a prefix is nobody else's business. The list grows during a step, and `take` empties it.
    """

    def __init__(self, pool: RecordingPool, block_size: int, hashes: BlockHashes) -> None:
        """Record the blocks of requests whose cache seed is one without a salt."""
        self._pool = pool
        self._block_size = block_size
        self._hashes, self._seed = hashes, hashes.seed("", None)
        self._known: set[bytes] = set()
        self._events: list[Event] = []
        pool.on_unindex = self._removed

    def stored(self, request: Request, first: int, end: int) -> None:
        """Record the request's blocks from first to end (exclusive) that are indexed and were not recorded before.

        A block that a tier brings back is not known by its tokens until a request is admitted with it.
        """
        adapter = request.adapter
        if request.spans or request.cache_seed != (self._hashes.seed("", adapter) if adapter else self._seed):
            return
        hashes, size = request.block_hashes, self._block_size
        for block in range(first, end):
            if hashes[block] in self._known or self._pool.lookup(hashes[block]) is None:
                continue
            self._known.add(hashes[block])
            parent = _name(hashes[block - 1]) if block else None
            token_ids = request.token_ids[block * size : (block + 1) * size]
            last = self._events[-1] if self._events else None
            if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
                last.block_hashes.append(_name(hashes[block]))
                last.token_ids += token_ids
            else:
                name = adapter.name if adapter is not None else None
                self._events.append(BlockStored([_name(hashes[block])], parent, token_ids, size, lora_name=name))

    def take(self) -> list[Event]:
        """Return the events so far, and begin anew."""
        events, self._events = self._events, []
        return events

    def _removed(self, block_hash: bytes) -> None:
        if block_hash not in self._known:
            return
        self._known.remove(block_hash)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(_name(block_hash))
        else:
            self._events.append(BlockRemoved([_name(block_hash)]))


def _name(block_hash: bytes) -> int:
    """The last 64 bits, which is what routers make of a longer hash."""
    return int.from_bytes(block_hash[-8:], "big")


class RecordingCache(KVCacheManager):
    """A KV cache manager that records events of what it caches."""

    pool_class = RecordingPool

    @cached_property
    def events(self) -> BlockEvents | None:
        """Of the group that keeps most, one that sees all if there is one; None if no blocks of tokens are cached."""
        if not self.prefix_caching or not self._paged:
            return None
        pool = self.pools[min(self._paged, key=lambda group: not self.specs[group].sees_all)]
        assert isinstance(pool, RecordingPool)
        return BlockEvents(pool, self.block_size, self.hashes)

    @override
    def admit(self, request: Request, num_cached_tokens: int, num_tokens: int) -> bool:
        is_admitted = super().admit(request, num_cached_tokens, num_tokens)
        if is_admitted and self.events is not None:
            self.events.stored(request, 0, request.first_new_block)
        return is_admitted

    @override
    def index_computed_blocks(self, request: Request) -> None:
        first = request.num_indexed_blocks
        super().index_computed_blocks(request)
        if self.events is not None:
            self.events.stored(request, first, request.num_indexed_blocks)
