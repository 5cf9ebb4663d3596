"""Keeps the blocks of one cache group: reference counts, free list in eviction order, index by content.

Invariant: a block is either referenced (count >= 1) or in the free list, never both. Block 0 is the null block and is
in neither. A free block keeps its index entry until it is handed out again, so the free list *is* the prefix cache. It
begins with blocks without content. The least recently freed blocks follow. Blocks with pinned content come last of all.
Every operation is O(1) per block. The pool knows nothing of requests. Paged KV cache: Kwon et al., 2023, section 4.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from weft.engine.request import Request

NULL_BLOCK = 0
"""Stands for a block that left the sliding window. It is never written, and never read unmasked."""


class BlockPool:
    """Owner of all blocks of one cache group. Mutated by `KVCacheManager` and by its helpers, `Pins` and `Offload`."""

    def __init__(self, num_blocks: int) -> None:
        """Make a pool of num_blocks (>= 2) blocks, the null block included; all others are free."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2, got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._pinned: set[bytes] = set()
        # The free list is circular and doubly linked, through the null block as its head. Blocks with pinned content
        # have a list of their own, whose head is one more entry.
        self._pinned_head = num_blocks
        self._next = [(block + 1) % num_blocks for block in range(num_blocks)] + [num_blocks]
        self._previous = [(block - 1) % num_blocks for block in range(num_blocks)] + [num_blocks]
        self.num_free = num_blocks - 1
        self.on_evict: Callable[[bytes, int], object] = lambda block_hash, block: None
        """Called with (hash, block) right before the block is handed out and its cached content forgotten."""

    @property
    def num_used(self) -> int:
        """Blocks that some request holds."""
        return self.num_blocks - 1 - self.num_free

    @property
    def num_indexed(self) -> int:
        """Blocks that can be found by content."""
        return len(self._index)

    def references(self, block: int) -> int:
        """How many requests hold the block."""
        return self._references[block]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take the first num_blocks free blocks in eviction order. Their content is evicted.

        Returns None and changes nothing when fewer are free.
        """
        if num_blocks > self.num_free:
            return None
        blocks = []
        for _ in range(num_blocks):
            block = self._next[NULL_BLOCK] or self._next[self._pinned_head]
            self._unlink(block)
            if (block_hash := self._hashes[block]) is not None:
                self.on_evict(block_hash, block)
                self.unindex(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """Take one more reference on a block that is held, or free but indexed."""
        if self._references[block] == 0:
            self._unlink(block)
        self._references[block] += 1

    def free(self, block: int) -> None:
        """Give one reference back. A block without references joins the free list."""
        self._references[block] -= 1
        if self._references[block] == 0:
            self._link(block)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block with this content, or None."""
        return self._index.get(block_hash)

    def is_indexed(self, block: int) -> bool:
        """Whether the block can be found by content."""
        return self._hashes[block] is not None

    def index(self, block: int, block_hash: bytes) -> bool:
        """Index the block by content. Return False if it has a hash already, or another block has this one."""
        if self._hashes[block] is not None or block_hash in self._index:
            return False
        self._hashes[block] = block_hash
        self._index[block_hash] = block
        return True

    def pin(self, block_hash: bytes) -> None:
        """Evict the block with this content after all unpinned ones. The block may be indexed later."""
        self._pinned.add(block_hash)
        self._relink(block_hash)

    def unpin(self, block_hash: bytes) -> None:
        """Undo `pin`; a block that is free counts as freed now."""
        self._pinned.discard(block_hash)
        self._relink(block_hash)

    def unindex(self, block: int) -> None:
        """Remove the block from the index, if it is there. Its place in the free list stays."""
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._index[block_hash]
            self._hashes[block] = None

    def check_integrity(self) -> None:
        """Assert the invariants. O(num_blocks); for tests and for an idle engine."""
        free = []
        for head in (NULL_BLOCK, self._pinned_head):
            block = self._next[head]
            while block != head:
                assert self._previous[self._next[block]] == block
                free.append(block)
                block = self._next[block]
        assert len(free) == len(set(free)) == self.num_free
        assert all(self._references[block] == 0 for block in free)
        held = [block for block in range(1, self.num_blocks) if self._references[block] > 0]
        assert len(held) + len(free) == self.num_blocks - 1
        assert min(self._references) >= 0 and self._references[NULL_BLOCK] == 0
        assert {h: b for b, h in enumerate(self._hashes) if h is not None} == self._index

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1

    def _relink(self, block_hash: bytes) -> None:
        block = self._index.get(block_hash)
        if block is not None and self._references[block] == 0:
            self._unlink(block)
            self._link(block)

    def _link(self, block: int) -> None:
        block_hash = self._hashes[block]
        head = self._pinned_head if block_hash in self._pinned else NULL_BLOCK
        before = head if block_hash is None else self._previous[head]
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.num_free += 1


def check_references(
    pool: BlockPool, group: int, requests: Sequence[Request], state_index: int | None, others: Iterable[int]
) -> None:
    """Assert that requests and others hold exactly the references that the pool of a group counts.

    For tests and for an idle engine.

    Args:
        state_index: Place of the group among those of states; None for a group of tokens.
        others: Blocks that a tier holds.
    """
    pool.check_integrity()
    counts = Counter(others)
    for request in requests:
        counts.update(request.block_tables[group] if request.block_tables else ())
        if state_index is not None and request.states_before_drafts:
            counts[request.states_before_drafts[state_index]] += 1
    counts.pop(NULL_BLOCK, None)
    held = {block: pool.references(block) for block in range(1, pool.num_blocks) if pool.references(block)}
    assert counts == held, f"group {group}: tables hold {counts}, pool says {held}"
