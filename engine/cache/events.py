"""Records which blocks became cached and which no longer are, for a router that sends prompts where their prefix is.

The events have the fields and the order of vLLM's. Only blocks of requests without a salt are recorded: an event holds
the token ids of its block, and a salt says that a prefix is nobody else's business. Lists are appended to during a
step, and `take` empties them; sending is for others.
"""

from typing import Literal

import msgspec

from weft.engine.cache.block_pool import BlockPool
from weft.engine.core.request import Request


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Blocks that follow each other, and whose content is cached now.

    Attributes:
        parent_block_hash: Of the block before the first; None at the beginning of a prompt.
        token_ids: Of all these blocks.
        medium: The first tier in vLLM's words, whatever the device.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: Literal["GPU"] = "GPU"
    lora_name: None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """Blocks whose content is cached no longer."""

    block_hashes: list[int]
    medium: Literal["GPU"] = "GPU"


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """Nothing is cached."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class BlockEvents:
    """Owner of the events of one pool since they were last taken."""

    def __init__(self, pool: BlockPool, block_size: int, seed: bytes) -> None:
        """Record the blocks of requests with this cache seed, the one without a salt."""
        self._pool = pool
        self._block_size = block_size
        self._seed = seed
        self._known: set[bytes] = set()
        self._events: list[Event] = []
        pool.on_unindex = self._removed

    def stored(self, request: Request, first: int, end: int) -> None:
        """Record the request's blocks from first to end (exclusive) that are indexed and were not recorded before.

        A block that a tier brings back is not known by its tokens until a request is admitted with it.
        """
        if request.cache_seed != self._seed:
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
                self._events.append(BlockStored([_name(hashes[block])], parent, token_ids, size))

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
