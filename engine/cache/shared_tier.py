"""Shares a tier with other engines: finds what they have put there, and stores prompts for them.

Before a prompt is admitted, the tier looks for its blocks. A prompt that others wait for is stored as soon as it is
computed, while its blocks stay cached. Both happen in the background and take a bounded time: no step waits for them.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from typing_extensions import override

from weft.engine.cache.block_pool import BlockPool
from weft.engine.cache.tier import BlockTier, CachedBlock, Offload

_SOUGHT_S = 5.0
"""What was looked for is not looked for again for so long. What takes longer to look for is computed, and until it has
ended, and for `_REST_S`, nothing more is looked for, loaded or stored."""

_REST_S = 30.0
"""How long a tier that answered late is left alone: each prompt would wait for it."""

_STORE_S = 30.0
"""Longest time in which a prompt is stored. What is not written by then is left out."""

_COPIES_PER_STEP = 8
"""Most blocks that are copied for storing between two steps."""


@dataclass(slots=True)
class _Store:
    """A prompt that is stored. What of it is left to keep is known once the tier has looked for what is there."""

    held: list[CachedBlock]
    sought: "Future[None]"
    until_s: float
    left: deque[CachedBlock] | None = None
    written: "Future[None] | None" = None
    done: "Future[None]" = field(default_factory=Future)


class SharedOffload(Offload):
    """An `Offload` whose tier may be shared. Owns one reference on each block that is being stored, too."""

    def __init__(self, tier: BlockTier | None, pools: Sequence[BlockPool]) -> None:
        """See `Offload`."""
        super().__init__(tier, pools)
        self._stores: list[_Store] = []
        self._seeking: dict[bytes, tuple[Future[None], float]] = {}  # by the last hash, with when to give up
        self._sought: dict[bytes, float] = {}  # by the last hash, when to look again
        self._slow: Future[None] | None = None  # took too long
        self._rests_until_s = 0.0

    @property
    @override
    def is_loading(self) -> bool:
        return super().is_loading or bool(self._stores)

    @property
    @override
    def is_stuck(self) -> bool:
        is_slow = self._slow is not None and (not self._slow.done() or time.monotonic() < self._rests_until_s)
        return super().is_stuck or is_slow

    def seek(self, hashes: Sequence[bytes]) -> bytes | None:
        """Begin to look for what other engines have put into the tier under the hashes of a prompt's blocks.

        Returns:
            The hash that `take_done` returns once that is known; None when it is known, or when nothing is missing.
        """
        now = time.monotonic()
        if self._tier is None or not hashes or self._sought.get(hashes[-1], 0.0) > now:
            return None
        if hashes[-1] not in self._seeking:
            if self.is_stuck:
                return None
            if all(lookup(block_hash) is not None for block_hash in hashes for lookup in self.lookups):
                return None
            if (sought := self._tier.seek(hashes)) is None:
                return None
            self._seeking[hashes[-1]] = sought, now + _SOUGHT_S
        return hashes[-1]

    def store(self, hashes: Sequence[bytes]) -> "Future[None]":
        """Begin to store what is cached of a prompt; `take_done` goes on with it.

        The future ends when other engines find it, or when it could not be written, or not in time.
        """
        found = [(group, h, pool.lookup(h)) for h in hashes for group, pool in enumerate(self._pools)]
        held = [CachedBlock(group, h, block) for group, h, block in found if block is not None]
        if self._tier is None or self.is_stuck or not held or (sought := self._tier.seek(hashes)) is None:
            (done := Future[None]()).set_result(None)
            return done
        for group, _, block in held:
            self._pools[group].acquire(block)
        self._stores.append(_Store(held, sought, time.monotonic() + _STORE_S))
        return self._stores[-1].done

    @override
    def take_done(self) -> list[bytes]:
        over, now = super().take_done(), time.monotonic()
        num_copies = _COPIES_PER_STEP
        for store in list(self._stores):
            num_copies -= self._go_on(store, num_copies)
            is_written = store.written is not None and store.written.done()
            if self._tier and now > store.until_s and not is_written:
                self._give_up(self._tier.flush() if store.sought.done() else store.sought, now)
            if self._tier is None or now > store.until_s or is_written:
                self._stores.remove(store)
                for group, _, block in reversed(store.held):  # the end of a prefix is evicted before its beginning
                    self._pools[group].free(block)
                store.done.set_result(None)
        if self._seeking:
            found = [last for last, (sought, until_s) in self._seeking.items() if sought.done() or now > until_s]
            self._sought = {last: until_s for last, until_s in self._sought.items() if until_s > now}
            self._sought |= dict.fromkeys(found, now + _SOUGHT_S)
            for last in found:
                sought, _ = self._seeking.pop(last)
                if not sought.done():
                    self._give_up(sought, now)
            over += found
        return over

    def _give_up(self, slow: "Future[None]", now: float) -> None:
        self._slow, self._rests_until_s = slow, now + _REST_S

    def _go_on(self, store: _Store, max_num_copies: int) -> int:
        """Keep some of what is left to store. Returns how many blocks these are."""
        num_copies, tier = 0, self._tier
        if tier is None or store.written or not store.sought.done():
            return 0
        if store.left is None:
            store.left = deque(each for each in store.held if not tier.has(each.group, each.block_hash))
        while store.left and num_copies < max_num_copies and tier.has_room(store.left[0].group):
            self._keep(tier, *store.left.popleft())
            num_copies += 1
        if not store.left:
            store.written = tier.flush()
        return num_copies

    @override
    def fail_steps(self, blocks: Sequence[CachedBlock]) -> None:
        super().fail_steps(blocks)
        failed = {(block.group, block.block_hash) for block in blocks}
        for store in self._stores:
            store.left = store.left and deque(each for each in store.left if each[:2] not in failed)

    @override
    def references(self, pool: BlockPool) -> list[int]:
        stored = [block for store in self._stores for group, _, block in store.held if self._pools[group] is pool]
        return super().references(pool) + stored
