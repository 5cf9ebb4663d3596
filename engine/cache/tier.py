"""Moves blocks between the pools and a second home, such as the memory of the host, which engines may share.

If a tier has a prefix that a waiting request needs, the prefix is loaded before the request is admitted. Meanwhile the
request is LOADING and all others go on: no step waits for a copy. Loaded blocks are cached like any others. If the tier
raises, its content counts as lost, and the engine goes on.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from typing_extensions import override

from weft.engine.cache.block_pool import BlockPool

_PATIENCE_S = 5.0
"""Requests wait for a load for so long, or for twice the time that computing it was predicted to take; and for so long
again when another load ends."""

_LOG_EVERY_S = 10.0
"""Least seconds between two logged faults of a tier: a broken one may raise for every block."""

logger = logging.getLogger(__name__)


class LoadStoppedError(Exception):
    """Of the blocks of a load only the first `num_loaded` are there; the next one cannot be loaded."""

    def __init__(self, num_loaded: int) -> None:
        """Keep the number."""
        super().__init__(num_loaded)
        self.num_loaded = num_loaded


class CachedBlock(NamedTuple):
    """A block of one cache group whose content has this hash."""

    group: int
    block_hash: bytes
    block: int


class BlockTier(Protocol):
    """Keeps content by cache group and hash. Called between two launches, so every call returns at once."""

    def keep(self, evicted: CachedBlock) -> None:
        """Queue a copy of this block, behind the launched steps. The next step may overwrite the block."""

    def has(self, group: int, block_hash: bytes) -> bool:
        """Whether this content can be loaded."""

    def load_seconds(self, blocks: Sequence[tuple[int, bytes]]) -> float:
        """Predicted seconds to load these (cache group, hash); 0 as long as nothing is known."""

    def load(self, blocks: Sequence[CachedBlock]) -> "Future[None]":
        """Begin to load these blocks, in order.

        The future ends when every later step finds the content, or with an error: `LoadStoppedError` if some are there.
        """

    def forget(self, group: int, block_hash: bytes) -> None:
        """Forget what is kept under this hash, if anything. It was never computed or cannot be loaded."""

    def seek(self, hashes: Sequence[bytes]) -> "Future[None] | None":
        """Begin to look for what others have put under the hashes of a prompt's blocks; `has` knows it afterwards.

        None if the tier is not shared with others. What follows is called only if it is.
        """

    def has_room(self, group: int) -> bool:
        """Whether `keep` would not drop a block for lack of room."""

    def flush(self) -> "Future[None]":
        """The future ends when others find all that was kept before, as far as it could be written."""


@dataclass(slots=True)
class _Load:
    done: "Future[None]"
    blocks: list[CachedBlock]
    held: list[tuple[BlockPool, int]]
    until_s: float
    is_trusted: bool = True
    is_awaited: bool = True


class Offload:
    """Moves blocks between pools and tier. Owns one reference on each block of the prefixes being loaded.

    A load that hangs keeps its blocks, since it may still write them, but no request waits for it, and nothing more is
    loaded until it ends.

    Attributes:
        lookups: One function per cache group. It returns None for content that neither the pool nor the tier has. Empty
            without a tier.
    """

    def __init__(self, tier: BlockTier | None, pools: Sequence[BlockPool]) -> None:
        """Let the tier, if there is one, keep what the pools evict."""
        self._tier = tier
        self._pools = pools
        self._loads: list[_Load] = []
        self._hashes: set[bytes] = set()
        self._next_log = 0.0
        self.lookups: tuple[Callable[[bytes], object], ...] = ()
        if tier is not None:
            self.lookups = tuple(partial(self._find, tier, group, pool) for group, pool in enumerate(pools))
            for group, pool in enumerate(pools):
                pool.on_evict = partial(self._keep, tier, group)

    @property
    def is_loading(self) -> bool:
        """Whether blocks are held for loads under way."""
        return bool(self._loads)

    @property
    def is_stuck(self) -> bool:
        """Whether a load under way is not waited for any longer."""
        return not all(load.is_awaited for load in self._loads)

    def begin(self, hashes_seen: Sequence[Sequence[bytes]], limit_s: float = 0.0) -> bytes | None:
        """Load the blocks that the pools lack of a prefix that pools and tier have together.

        Args:
            hashes_seen: Per cache group, the hashes of the blocks that the next token sees.
            limit_s: What would take longer is not loaded: predicted seconds to compute it. 0 for no limit.

        Returns:
            A hash that is being loaded now, for this prefix or for another one that shares it; None when nothing is
            missing, when it would take too long, when too few blocks are free or loads hold most of them, or when
            the tier fails or is stuck. Cached blocks may be evicted all the same.
        """
        assert self._tier is not None
        if self.is_stuck:
            return None
        groups = enumerate(zip(self._pools, hashes_seen, strict=True))
        lacked = [(group, h) for group, (pool, hashes) in groups for h in hashes if pool.lookup(h) is None]
        if limit_s and self._tier.load_seconds(lacked) >= limit_s:
            return None
        held: list[tuple[BlockPool, int]] = []
        blocks: list[CachedBlock] = []
        for group, (pool, hashes) in enumerate(zip(self._pools, hashes_seen, strict=True)):
            found = {block_hash: pool.lookup(block_hash) for block_hash in hashes}
            for block in found.values():
                if block is not None:
                    pool.acquire(block)  # or the missing blocks might evict this one
                    held.append((pool, block))
            missing = [block_hash for block_hash, block in found.items() if block is None]
            on_its_way = next((h for h in reversed(missing) if h in self._hashes), None)
            new = pool.allocate(len(missing)) if on_its_way is None else None
            if new is None:
                _free(held)
                return on_its_way
            held += [(pool, block) for block in new]
            blocks += [CachedBlock(group, h, block) for h, block in zip(missing, new, strict=True)]
        if not blocks or any(self._is_crowded(pool, held) for pool in self._pools):
            _free(held)
            return None
        try:
            done = self._tier.load(blocks)
        except Exception:
            self._log_fault("load blocks")
            self._forget(blocks)
            _free(held)
            return None
        self._loads.append(_Load(done, blocks, held, time.monotonic() + max(_PATIENCE_S, 2 * limit_s)))
        self._hashes.update(block.block_hash for block in blocks)
        return blocks[-1].block_hash

    def take_done(self) -> list[bytes]:
        """Index the loaded blocks. Return the hashes that no request needs to wait for any longer."""
        over, now = list[bytes](), time.monotonic()
        for load in self._loads:
            if load.is_awaited and now > load.until_s and not load.done.done():
                load.is_awaited = False
                over += [block.block_hash for block in load.blocks]
                logger.warning("a load of %d evicted blocks hangs: they are computed again", len(load.blocks))
        for load in [load for load in self._loads if load.done.done()]:
            self._loads.remove(load)
            error = CancelledError() if load.done.cancelled() else load.done.exception()
            num_loaded = len(load.blocks) if error is None else 0
            if isinstance(error, LoadStoppedError):
                num_loaded = error.num_loaded
                self._forget(load.blocks[num_loaded : num_loaded + 1])
            elif error is not None:
                self._forget(load.blocks)
            for group, block_hash, block in load.blocks[: num_loaded * load.is_trusted]:
                self._pools[group].index(block, block_hash)
            over += [block.block_hash for block in load.blocks]
            _free(load.held)
            for other in self._loads:  # which may have waited for this one
                other.until_s = max(other.until_s, now + _PATIENCE_S)
        self._hashes.difference_update(over)
        return over

    def fail_steps(self, blocks: Sequence[CachedBlock]) -> None:
        """Forget the content of failed steps. A load under way of any of it may have read it: it is not trusted."""
        self._forget(blocks)
        failed = {(block.group, block.block_hash) for block in blocks}
        for load in self._loads:
            if any((block.group, block.block_hash) in failed for block in load.blocks):
                load.is_trusted = False

    def references(self, pool: BlockPool) -> list[int]:
        """Blocks of a pool that are held here, one entry per reference."""
        return [block for load in self._loads for holder, block in load.held if holder is pool]

    def _is_crowded(self, pool: BlockPool, held: list[tuple[BlockPool, int]]) -> bool:
        """Whether what may hang, loads and stores, would hold more than seven eighths of a pool."""
        num_held = len(self.references(pool)) + sum(holder is pool for holder, _ in held)
        return num_held > pool.num_blocks * 7 // 8

    def _keep(self, tier: BlockTier, group: int, block_hash: bytes, block: int) -> None:
        try:
            tier.keep(CachedBlock(group, block_hash, block))
        except Exception:
            self._log_fault("keep a block")

    def _find(self, tier: BlockTier, group: int, pool: BlockPool, block_hash: bytes) -> object:
        block = pool.lookup(block_hash)
        try:
            return block if block is not None else tier.has(group, block_hash) or None
        except Exception:
            self._log_fault("look up a block")
            return None

    def _forget(self, blocks: Sequence[CachedBlock]) -> None:
        if self._tier is None:
            return
        try:
            for group, block_hash, _ in blocks:
                self._tier.forget(group, block_hash)
        except Exception:
            logger.exception("the cache tier failed to forget a block; it is not used any more")
            self._tier = None  # what it finds may never have been computed
            self.lookups = ()
            for pool in self._pools:
                pool.on_evict = lambda block_hash, block: None

    def _log_fault(self, action: str) -> None:
        if time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_EVERY_S
            logger.exception("the cache tier failed to %s; its content counts as lost", action)


def _free(held: list[tuple[BlockPool, int]]) -> None:
    for pool, block in reversed(held):  # the end of a prefix is evicted before its beginning
        pool.free(block)


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
    """An `Offload` whose tier may be shared with other engines. Owns one reference on each block being stored, too.

    Before a prompt is admitted, the tier looks for its blocks. A prompt that others wait for is stored as soon as it is
    computed, while its blocks stay cached. Both happen in the background and take a bounded time.
    """

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
