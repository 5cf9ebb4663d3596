"""Gives requests their blocks: prefix lookup, allocation, copy-on-write, indexing.

There is one block table and one pool per cache group. The group's spec says how many tokens a block stands for. Blocks
are indexed by a keyed, chained 128-bit hash when they are *scheduled*. Within a layer, writes precede reads, so a
request of the same step may already read them. A failed step un-indexes them. If another running request is about to
compute the next block of a prompt, the prompt waits for it. So requests that arrive together compute a common prefix
once. Unverified tokens (drafts, placeholders) are never indexed.

A state is a block that stands for all tokens so far, and it is indexed where it is worth it (`state_stops.py`). An
indexed state never changes: a request that goes on from it copies it first, be it the one that computed it. A model
with states indexes the blocks of a step when the request is scheduled again or freed, since states are copied before a
step, and others may begin with them in that step.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.engine.cache.block_pool import NULL_BLOCK, BlockPool, check_references
from weft.engine.cache.prefixes import LEAST_TOKENS, BlockHashes, Pins, awaited_stop, is_stop, next_stop, stops_of
from weft.engine.cache.specs import CacheSpec, ModuleCache
from weft.engine.cache.tier import BlockTier, CachedBlock, SharedOffload
from weft.engine.cache.whole_pictures import WholePictures
from weft.engine.request import Request


@dataclass(slots=True)
class StepBlocks:
    """Block bookkeeping of one step: index entries to undo if it fails, and copies to make first.

    Per cache group, `copies` has the source of each block that is copied to. Sources are read before any is written.
    """

    copies: list[dict[int, int]]
    indexed: list[CachedBlock] = field(default_factory=list)


class KVCacheManager:
    """Owner of the block pools and of every request's block tables.

    Mutated on the engine's thread only: while a step is scheduled, when steps fail, and when a draft model takes slots.

    Attributes:
        offload: Moves blocks between the pools and a tier; its `lookups` are empty without one.
        num_ready: How many of so many tokens of a request, from one on, come before a picture that is not encoded yet.
        pictures: What a step must not cut.
    """

    pool_class = BlockPool

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        specs: Sequence[CacheSpec],
        prefix_caching: bool = True,
        max_num_pinned_blocks: int = 0,
        num_states: int = 0,
        tier: BlockTier | None = None,
        least_stop: int = LEAST_TOKENS,
        hash_key: bytes | None = None,
    ) -> None:
        """Make one pool for each cache group.

        Args:
            num_blocks: Blocks in each group that has blocks of tokens, the null block included.
            specs: One entry per group.
            num_states: States in each group of states, those for prefixes and before drafts included.
            tier: Keeps evicted content; without one (None) it is lost.
            least_stop: Fewest tokens for which states are kept.
            hash_key: Of the hashes that the tier knows; None draws a new one.
        """
        self.block_size = block_size
        self.specs = tuple(specs)
        self.can_rewind = all(spec.can_rewind for spec in specs)
        self.can_copy = not any(isinstance(spec, ModuleCache) for spec in specs)
        self.is_whole = any(spec.is_bidirectional for spec in specs)
        self.pictures = WholePictures(specs)
        self.prefix_caching = prefix_caching and self.can_copy and not self.is_whole
        self.num_blocks, self._least_stop = num_blocks - 1, least_stop
        self.pools = tuple(self.pool_class(spec.pool_size(num_blocks, num_states)) for spec in specs)
        self.pins = Pins(self.pools, max_num_pinned_blocks)
        self._block_sizes = tuple(spec.tokens_per_block(block_size) for spec in specs)
        self._paged = tuple(group for group, size in enumerate(self._block_sizes) if size == block_size)
        self._paged_pools = tuple(self.pools[group] for group in self._paged)
        self._all_groups = tuple(range(len(self.specs)))
        self._states = tuple(group for group in self._all_groups if group not in self._paged)
        self._see_all = all(specs[group].sees_all for group in self._paged)
        self.hashes = BlockHashes(block_size, hash_key)
        self._lookups: tuple[Callable[[bytes], object], ...] = tuple(pool.lookup for pool in self.pools)
        self.offload = SharedOffload(tier, self.pools)
        self._leaders: dict[bytes, Request] = {}
        self.wake_followers: Callable[[bytes], object] = lambda block_hash: None
        self.num_ready: Callable[[Request, int, int], int] = lambda request, start, num_tokens: num_tokens
        self._step_blocks = StepBlocks([{} for _ in self.pools])

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of tokens, in the group that has the fewest."""
        return min((pool.num_free for pool in self._paged_pools), default=self.num_blocks)

    def take_step_blocks(self) -> StepBlocks:
        """Return the bookkeeping of the step that was just scheduled, and start that of the next one."""
        step_blocks, self._step_blocks = self._step_blocks, StepBlocks([{} for _ in self.pools])
        return step_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens take."""
        return -(-num_tokens // self.block_size)

    # --- prefix cache ---------------------------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> int:
        """How many leading tokens of a waiting request are in the cache, a multiple of the block size.

        Looks only at hashed blocks. At least one token is left to compute, since its logits are needed. A request whose
        prompt is still to be scored finds nothing. O(blocks found).
        """
        return self._num_found_blocks(request, self._lookups, self._all_groups) * self.block_size

    def bring_back(self, request: Request, compute_s: Callable[[int, int], float]) -> bytes | None:
        """Begin to find and to load the blocks of a waiting request's prefix that only the tier has. Needs a tier.

        Args:
            compute_s: Predicted seconds to compute so many tokens behind so many others; 0 as long as none are known.

        Returns:
            The hash that `wake_followers` gets once that has ended or failed; None when nothing is to be found, and
            nothing is loaded, for example because it would take longer than to compute it.
        """
        if (sought := self.offload.seek(request.block_hashes)) is not None:
            return sought
        num_blocks = self._num_found_blocks(request, self.offload.lookups, self._all_groups)
        position = num_blocks * self.block_size
        firsts = [self._first_visible_block(group, position) for group in self._all_groups]
        num_cached = self.find_prefix(request)
        limit_s = compute_s(position - num_cached, num_cached)
        return self.offload.begin([request.block_hashes[first:num_blocks] for first in firsts], limit_s)

    def finish_loads(self) -> bool:
        """Index the blocks that have been loaded, and wake who waits for them. Return whether loads are under way."""
        for block_hash in self.offload.take_done():
            self.wake_followers(block_hash)
        return self.offload.is_loading

    def _num_found_blocks(
        self, request: Request, lookups: Sequence[Callable[[bytes], object]], groups: Sequence[int]
    ) -> int:
        """Longest prefix, in blocks, of which lookups (one per group) find all blocks that the next token sees."""
        if _is_unscored(request):
            return 0
        hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        num_blocks = len(hashes) + 1
        while num_blocks != len(hashes):  # groups may differ; shorten until all agree
            num_blocks = len(hashes)
            for group in groups:
                hashes = hashes[: self._longest_run(lookups[group], hashes, group)]
        return num_blocks if num_blocks * self.block_size >= request.num_input_slots else 0

    def _longest_run(self, lookup: Callable[[bytes], object], hashes: Sequence[bytes], group: int) -> int:
        if self.specs[group].sees_all:
            return next((i for i, block_hash in enumerate(hashes) if lookup(block_hash) is None), len(hashes))
        end = len(hashes)
        for block in reversed(range(len(hashes))):  # those from here to the end are all found
            if block < self._first_visible_block(group, end * self.block_size):
                break
            if lookup(hashes[block]) is None:
                end = block
        return end

    def awaited_hash(self, request: Request, num_cached_tokens: int) -> bytes | None:
        """Hash of the last block that the request should wait for; None if there is none.

        Other running requests are about to compute this block and all blocks between it and the cached prefix. Looks
        only at hashed blocks. `wake_followers` gets the hash once the block is computed, or will not be. Where there
        are states, the request that computes the block is asked to keep them there.
        """
        if self._states:
            if _is_unscored(request) or self.num_unhashed_blocks(request):
                return None  # of a prompt that is hashed in part, only a part of what is shared is known
            return awaited_stop(request, self._leaders, num_cached_tokens, self.block_size, self._least_stop)
        awaited = None
        if not _is_unscored(request):
            first, end = num_cached_tokens // self.block_size, (request.num_tokens - 1) // self.block_size
            for block_hash in request.block_hashes[first:end]:
                if block_hash not in self._leaders:
                    break
                awaited = block_hash
        return awaited

    def plan_stops(self, request: Request, num_cached_tokens: int) -> None:
        """Choose where the states of a waiting request will be kept, once all its blocks are hashed."""
        if not self._states or not self._caches(request):
            return
        num_shared = self._num_found_blocks(request, self._lookups, self._paged) if self._paged else 0
        request.state_stops = stops_of(request, num_shared, num_cached_tokens, self.block_size, self._least_stop)

    def num_unhashed_blocks(self, request: Request) -> int:
        """Full blocks of known tokens that have no hash yet; 0 for a request that does not use the cache."""
        return len(request.token_ids) // self.block_size - len(request.block_hashes) if self._caches(request) else 0

    def hash_blocks(self, request: Request, max_num_blocks: int | None = None) -> None:
        """Hash the full blocks of known tokens that have no hash yet: the first max_num_blocks of them, or all."""
        num_blocks = self.num_unhashed_blocks(request)
        if max_num_blocks is not None:
            num_blocks = min(num_blocks, max_num_blocks)
        self.hashes.extend(request, num_blocks)

    # --- life of a request ----------------------------------------------------------------------------------------

    def admit(self, request: Request, num_cached_tokens: int, num_tokens: int) -> bool:
        """Give a waiting request its cached prefix and slots for the next num_tokens tokens.

        Sets num_computed_tokens to the cached prefix. All blocks of the request must be hashed. It becomes the leader
        of the blocks that it will compute: others wait for them. Returns False and changes nothing when too few blocks
        are free.
        """
        assert not self.num_unhashed_blocks(request)
        num_cached_blocks = num_cached_tokens // self.block_size
        hashes = request.block_hashes[:num_cached_blocks]
        tables = []
        for group, pool in enumerate(self.pools):
            first = min(self._first_visible_block(group, num_cached_tokens), num_cached_blocks)
            table = array("q", [NULL_BLOCK] * first if group in self._paged else [])
            for block_hash in hashes[first:]:
                block = pool.lookup(block_hash)
                assert block is not None
                pool.acquire(block)
                table.append(block)
            tables.append(table)
        request.block_tables = tables
        request.num_free_window_blocks = [
            min(self._first_visible_block(group, num_cached_tokens), num_cached_blocks) for group in self._all_groups
        ]
        request.num_computed_tokens = num_cached_tokens
        request.num_indexed_blocks = request.first_new_block = num_cached_blocks
        if not self.allocate(request, num_tokens):
            self._release(request)
            return False
        for block, block_hash in enumerate(request.block_hashes[num_cached_blocks:], num_cached_blocks + 1):
            leader = self._leaders.get(block_hash)
            if leader is None or leader.num_computed_tokens > block * self.block_size:  # its state is beyond
                self._leaders[block_hash] = request
        for pin in request.caching.pins:
            self.pins.add(request.block_hashes[: pin.num_tokens // self.block_size], time.monotonic() + pin.ttl_s)
        return True

    def num_held_blocks(self, request: Request, num_cached_tokens: int) -> int:
        """How many blocks of a cached prefix cost no free block.

        Others hold these blocks, or no coming token sees them. The least over the groups. O(blocks of the prefix).
        """
        hashes = request.block_hashes[: num_cached_tokens // self.block_size]
        found = ([pool.lookup(block_hash) for block_hash in hashes] for pool in self._paged_pools)
        counts = (
            sum(block is None or pool.references(block) > 0 for block in blocks)
            for pool, blocks in zip(self._paged_pools, found, strict=True)
        )
        return min(counts, default=0)

    def num_available_tokens(self, request: Request) -> int:
        """Most tokens for which `allocate` can succeed now, once it has freed the blocks that left the window.

        They cut no picture whose tokens see each other.
        """
        num_blocks = self._num_held(request) + self.num_free_blocks
        num_tokens = num_blocks * self.block_size - request.num_computed_tokens
        num_tokens = self.pictures.cut(request, request.num_computed_tokens, num_tokens)
        if not all(self.pools[group].num_free for group in self._states):
            return min(num_tokens, request.num_new_tokens)  # no drafts, for lack of a second state
        return num_tokens

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Reserve slots for the next num_tokens (>= 1) tokens of a request.

        Appends block ids. An id already there changes only if the first of these tokens falls into a block that others
        hold too, or if an indexed state would change. That block is then copied first. The states before drafts are
        kept until `accept`. Under a sliding window, blocks that no coming token sees are freed before. Returns False
        and changes nothing else when fewer blocks are free than needed. O(blocks).
        """
        start = request.num_computed_tokens
        if self._states:
            self.index_computed_blocks(request)
        self._free_out_of_window(request)
        end = start + num_tokens
        has_drafts = end > request.num_tokens
        plans = []
        groups = zip(self.pools, request.block_tables, self._block_sizes, strict=True)
        for group, (pool, table, block_size) in enumerate(groups):
            first = start // block_size
            num_needed = -(-end // block_size)
            is_shared = first < len(table) and pool.references(table[first]) > 1
            if table and group in self._states:
                is_shared |= has_drafts or self._must_stay(pool, table[0])
            num_new = max(0, num_needed - len(table))
            if pool.num_free < num_new + is_shared:
                return False
            if num_new or is_shared:
                plans.append((group, pool, table, first, num_new, is_shared))
        for group, pool, table, first, num_new, is_shared in plans:
            blocks = pool.allocate(num_new + is_shared)
            assert blocks is not None
            if is_shared:
                copy, copies = blocks.pop(), self._step_blocks.copies[group]
                copies[copy] = copies.get(table[first], table[first])  # a copy may be copied before it is made
                if has_drafts and group in self._states:
                    request.states_before_drafts.append(table[first])
                else:
                    pool.free(table[first])
                table[first] = copy
            table.extend(blocks)
        return True

    def _must_stay(self, pool: BlockPool, state: int) -> bool:
        """Whether a state is indexed and so must not change. It is given up if there is no room for a copy."""
        if pool.is_indexed(state) and not pool.num_free and pool.references(state) == 1:
            pool.unindex(state)
        return pool.is_indexed(state)

    def accept(self, request: Request, start: int, num_tokens: int) -> None:
        """Go back behind refused drafts, once those of the last step are verified.

        A state goes back to where the step began, and the tokens are computed again.

        Args:
            start: num_computed_tokens before that step.
            num_tokens: Computed tokens that are right, accepted drafts included.
        """
        is_whole = num_tokens == request.num_computed_tokens
        request.num_computed_tokens = num_tokens if is_whole or self.can_rewind else start
        for group, state in zip(self._states, request.states_before_drafts, strict=False):
            table = request.block_tables[group]
            if not is_whole:
                table[0], state = state, table[0]
            self.pools[group].free(state)
        request.states_before_drafts = []

    def reserve(self, request: Request, num_tokens: int) -> int:
        """Reserve slots for up to num_tokens (>= 1) next tokens, written before a step is scheduled for them.

        Allocates if there are blocks for all of them. Returns how many slots there are; 0 when a block would have to be
        copied first.
        """
        assert self.can_rewind
        first = request.num_computed_tokens // self.block_size
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            if first < len(table) and pool.references(table[first]) > 1:
                return 0
        self.allocate(request, num_tokens)
        return min(num_tokens, self._num_held(request) * self.block_size - request.num_computed_tokens)

    def index_computed_blocks(self, request: Request) -> None:
        """Index the full blocks whose tokens are known and scheduled. The request stops leading them."""
        num_known = min(request.num_computed_tokens, len(request.token_ids))
        num_full = num_known // self.block_size
        if not self._caches(request) or num_full <= request.num_indexed_blocks:
            return
        self.hash_blocks(request)
        for block in range(request.num_indexed_blocks, num_full):
            block_hash = request.block_hashes[block]
            for group in self._paged:
                self._index(group, request.block_tables[group][block], block_hash)
            if (block + 1) * self.block_size == request.num_computed_tokens and self._is_stop(request):
                for group in self._states:
                    self._index(group, request.block_tables[group][0], block_hash)
            self._stop_leading(request, block_hash)
        request.num_indexed_blocks = num_full

    def _index(self, group: int, block: int, block_hash: bytes) -> None:
        if block != NULL_BLOCK and self.pools[group].index(block, block_hash):
            self._step_blocks.indexed.append(CachedBlock(group, block_hash, block))

    def _is_stop(self, request: Request) -> bool:
        return is_stop(request, request.num_computed_tokens, self.block_size, self._least_stop)

    def num_tokens_before_stop(self, request: Request, start: int, num_tokens: int) -> int:
        """Cut the num_tokens (>= 1) tokens of a request from start on before a picture, and where states are needed.

        Pending choices go on from them, so it must stop before the last token of the prompt. And some are kept for
        others. A picture must be encoded before, and if its tokens see each other, all of them must be computed.
        """
        num_tokens = self.pictures.cut(request, start, self.num_ready(request, start, num_tokens))
        if not self._states:
            return num_tokens
        num_left = request.num_prompt_tokens - 1 - start
        if request.pending_indices and num_left > 0:
            num_tokens = min(num_tokens, num_left)
        if self._caches(request):
            num_tokens = min(num_tokens, next_stop(request, start, self.block_size, self._least_stop) - start)
        return num_tokens

    def must_fork(self, request: Request) -> bool:
        """Whether pending choices can go on from the request's present state, but not from its next one."""
        return not self.can_rewind and 0 < request.num_computed_tokens == request.num_prompt_tokens - 1

    def fork(self, parent: Request, child: Request) -> None:
        """Let the child share the parent's blocks that hold their common tokens.

        The child's tokens begin as the parent's do. The child computes its last token itself, for the logits. The block
        of that token is copied on write. A fork that finds no block for the copy must be freed again, or all holders
        could wait for each other. A state beyond the child's tokens is of no use to it. The child then begins at its
        first token.
        """
        num_shared = min(parent.num_computed_tokens, len(child.token_ids) - 1)
        if (num_shared < parent.num_computed_tokens and not self.can_rewind) or not self.can_copy:
            num_shared = 0
        num_blocks = self.num_blocks_for(num_shared)
        child.block_tables = []
        for pool, table in zip(self.pools, parent.block_tables, strict=True):
            shared = table[:num_blocks]
            for block in shared:
                if block != NULL_BLOCK:
                    pool.acquire(block)
            child.block_tables.append(shared)
        child.num_computed_tokens = num_shared
        child.block_hashes = parent.block_hashes[: len(child.token_ids) // self.block_size]
        child.num_indexed_blocks = min(parent.num_indexed_blocks, num_shared // self.block_size)
        child.first_new_block = num_shared // self.block_size
        child.num_free_window_blocks = [min(n, num_blocks) for n in parent.num_free_window_blocks]

    def free(self, request: Request) -> None:
        """Index what a request has computed, and free its blocks. They stay findable until handed out again."""
        self.index_computed_blocks(request)
        for block_hash in request.block_hashes[request.num_indexed_blocks :]:
            self._stop_leading(request, block_hash)
        self._release(request)

    def lacks_copies(self, request: Request, failed: Sequence[StepBlocks]) -> bool:
        """Whether a request holds a block that failed steps should have copied, or is yet to get a copy of one.

        Such a request need not be in these steps: a fork may wait for its turn beside its copy.
        """
        for group, table in enumerate(request.block_tables):
            coming = self._step_blocks.copies[group]
            missing = {target for step_blocks in failed for target in step_blocks.copies[group]}
            if any(coming.get(block, block) in missing for block in table):
                return True
        return False

    def fail_steps(self, failed: Sequence[StepBlocks]) -> None:
        """Un-index the blocks that failed steps had indexed, since their content was never written.

        Blocks that were indexed after the last of these steps are un-indexed too: they may end in tokens of these
        steps.
        """
        for step_blocks in (*failed, self._step_blocks):
            for group, _, block in step_blocks.indexed:
                self.pools[group].unindex(block)
            self.offload.fail_steps(step_blocks.indexed)
        self._step_blocks.indexed.clear()

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Assert that the tables of all live requests account for every reference in the pools."""
        for group, pool in enumerate(self.pools):
            index = self._states.index(group) if group in self._states else None
            check_references(pool, group, requests, index, self.offload.references(pool))
        assert all(leader in requests for leader in self._leaders.values())

    # --- helpers --------------------------------------------------------------------------------------------------

    def _caches(self, request: Request) -> bool:
        return self.prefix_caching and request.caching.is_used

    def _first_visible_block(self, group: int, position: int) -> int:
        """First block that the token at position (or any later one) sees. Of states it sees the last one."""
        return self.specs[group].first_seen(position) // self.block_size

    def _num_held(self, request: Request) -> int:
        """Blocks of tokens that a request holds in each group that has them; all blocks if no group has."""
        return len(request.block_tables[self._paged[0]]) if self._paged else self.num_blocks

    def has_completed_block(self, request: Request) -> bool:
        """Whether the request has filled a block since its (re)admission. Preempting it then keeps some progress."""
        return request.num_computed_tokens // self.block_size > request.first_new_block

    def _free_out_of_window(self, request: Request) -> None:
        """Free the blocks that no coming token sees. Pending choices see what the last token of the prompt sees."""
        if self._see_all:
            return
        position = request.num_computed_tokens
        if request.pending_indices:
            position = min(position, request.num_prompt_tokens - 1)
        for group in self._paged:
            pool, table = self.pools[group], request.block_tables[group]
            first = self._first_visible_block(group, position)
            for block in range(request.num_free_window_blocks[group], min(first, len(table))):
                if table[block] != NULL_BLOCK:
                    pool.free(table[block])
                    table[block] = NULL_BLOCK
            request.num_free_window_blocks[group] = max(request.num_free_window_blocks[group], min(first, len(table)))

    def _release(self, request: Request) -> None:
        for group, state in zip(self._states, request.states_before_drafts, strict=False):
            self.pools[group].free(state)
        request.states_before_drafts = []
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            for block in reversed(table):  # the end of a prefix is evicted before its beginning
                if block != NULL_BLOCK:
                    pool.free(block)
        request.block_tables = []
        request.num_free_window_blocks = []
        request.num_computed_tokens = request.num_indexed_blocks = request.first_new_block = 0

    def _stop_leading(self, request: Request, block_hash: bytes) -> None:
        if self._leaders.get(block_hash) is request:
            del self._leaders[block_hash]
            self.wake_followers(block_hash)


def _is_unscored(request: Request) -> bool:
    """Whether log-probabilities or hidden states of the whole prompt are wanted, so that all of it must be computed."""
    if request.pooler is not None:
        return request.pooler.needs_whole_prompt
    return request.params.prompt_logprobs is not None and request.num_scored_tokens < request.num_prompt_tokens
