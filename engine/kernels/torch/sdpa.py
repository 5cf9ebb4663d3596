"""The reference attention: torch's scaled_dot_product_attention over a paged cache, on the CPU and on CUDA.

Keys and values of a layer are two tensors over flat slots. Requests that compute one token are batched by similar
context; others run one by one, over blocks of queries, so that masks stay small. Indices and masks are made once per
step. Positions that a request may not see are gathered from the null block, which nobody writes, so that what other
requests left behind in a block (not-a-numbers, too) never reaches a result. Grouped query attention reads each K/V
head once, for all the query heads that share it. torch's operation has no soft cap: `soft_cap` stands in for it.
"""

from dataclasses import dataclass

import numpy as np
import torch

from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.torch.soft_cap import Attention, choose_attention
from weft.engine.step.batch import Batch, GroupBatch, Ints

_QUERY_BLOCK = 512
"""Queries that attend together when a mask is needed."""

_GATHERED_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Most context tokens that one batch of decodes gathers."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Requests with one token each and similar context.

    Attributes:
        rows: (num_requests,) token index of each.
        slots: (num_requests * context,) where their K/V lies, slot 0 where a request sees nothing.
        mask: (num_requests, 1, 1, context), true where a request sees a token; None when they see all.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _QueryBlock:
    """Queries [start, stop) of a chunk and the keys [first_key, last_key) of its context that any of them sees.

    The mask is (stop - start, last_key - first_key); None means causal from the first key on.
    """

    start: int
    stop: int
    first_key: int
    last_key: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A request with several tokens, [start, stop) of the step.

    The slots of its context are None when the context is the chunk itself, whose K/V need no gathering.
    """

    start: int
    stop: int
    slots: torch.Tensor | None
    blocks: tuple[_QueryBlock, ...]


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """What all layers of a KV group share in a step."""

    attention: Attention
    slot_mapping: torch.Tensor
    decodes: tuple[_Decodes, ...]
    chunks: tuple[_Chunk, ...]


class SdpaBackend:
    """Owns the cache of every layer: keys and values, each (num_blocks * block_size, num_kv_heads, head_dim)."""

    name = "sdpa"
    supports_graphs = False

    def __init__(
        self,
        groups: tuple[CacheGroup[PagedKV], ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the cache; only the null block, which stays zero for ever, is touched: the rest takes no memory."""
        self._groups = groups
        self._block_size = block_size
        self._device = device
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        for group in groups:
            shape = (num_blocks * block_size, group.spec.num_kv_heads, group.spec.head_dim)
            for layer in group.layers:
                for caches in (self._keys, self._values):
                    caches[layer] = torch.empty(shape, dtype=dtype, device=device)
                    caches[layer][:block_size] = 0
        # Gathered keys and values; kept, because fresh memory costs more than the copy (page faults).
        self._workspaces = (torch.empty(0, dtype=dtype, device=device), torch.empty(0, dtype=dtype, device=device))

    def prepare(self) -> bool:
        """Nothing is prepared: the reference takes memory as it writes to it."""
        return False

    def begin(self, batch: Batch) -> "SdpaStep":
        """Copy the blocks that the batch asks for, and plan the step."""
        plans: dict[int, _GroupPlan] = {}
        for group, group_batch in zip(self._groups, batch.groups, strict=True):
            self._copy_blocks(group, group_batch.block_copies)
            plan = _Planner(batch, group_batch, group.spec, self._block_size, self._device).plan()
            plans.update(dict.fromkeys(group.layers, plan))
        return SdpaStep(self, plans)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys and values (num_tokens, num_kv_heads, head_dim) into slots (num_tokens,)."""
        self._keys[layer].index_copy_(0, slots, keys)
        self._values[layer].index_copy_(0, slots, values)

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots (n,), each (n, num_kv_heads, head_dim); valid until the next gather."""
        caches = (self._keys[layer], self._values[layer])
        shape = (len(slots), *caches[0].shape[1:])
        size = shape[0] * shape[1] * shape[2]
        if len(self._workspaces[0]) < size:
            keys, values = (torch.empty(size, dtype=cache.dtype, device=cache.device) for cache in caches)
            self._workspaces = keys, values
        keys, values = (
            torch.index_select(cache, 0, slots, out=workspace[:size].view(shape))
            for cache, workspace in zip(caches, self._workspaces, strict=True)
        )
        return keys, values

    def _copy_blocks(self, group: CacheGroup[PagedKV], copies: Ints) -> None:
        if not len(copies):
            return
        sources, targets = torch.from_numpy(copies).to(self._device).unbind(1)
        for layer in group.layers:
            for cache in (self._keys[layer], self._values[layer]):
                blocks = cache.view(-1, self._block_size, *cache.shape[1:])
                blocks.index_copy_(0, targets, blocks.index_select(0, sources))


class SdpaStep:
    """Attention for one step; see `AttentionStep`."""

    def __init__(self, backend: SdpaBackend, plans: dict[int, _GroupPlan]) -> None:
        """Attend by the plan that each layer has."""
        self._backend = backend
        self._plans = plans

    def cache(self, layer: int) -> None:
        """Nothing: `attend` writes."""

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write K/V, then attend; shapes as in `AttentionStep.attend`."""
        plan = self._plans[layer]
        self._backend.write(layer, plan.slot_mapping, keys, values)
        attended = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for decodes in plan.decodes:
            attended.index_copy_(0, decodes.rows, self._decode(layer, plan.attention, decodes, queries))
        for chunk in plan.chunks:
            tokens = slice(chunk.start, chunk.stop)
            context = (keys[tokens], values[tokens])
            if chunk.slots is not None:
                context = self._backend.gather(layer, chunk.slots)
            _attend_chunk(plan.attention, chunk, queries[tokens], *context, attended[tokens])
        return attended

    def _decode(self, layer: int, attention: Attention, decodes: _Decodes, queries: torch.Tensor) -> torch.Tensor:
        num_requests, num_heads, head_dim = len(decodes.rows), *queries.shape[1:]
        keys, values = self._backend.gather(layer, decodes.slots)
        num_kv_heads = keys.shape[1]
        # On the CPU one row of queries at a time is fastest. CUDA's kernels take a mask only with equal numbers of
        # heads, so there the query heads that share a K/V head stand as its rows of queries.
        heads = num_kv_heads if queries.is_cuda else num_heads
        attended = attention(
            queries.index_select(0, decodes.rows).view(num_requests, heads, -1, head_dim),
            keys.view(num_requests, -1, num_kv_heads, head_dim).transpose(1, 2),
            values.view(num_requests, -1, num_kv_heads, head_dim).transpose(1, 2),
            attn_mask=decodes.mask,
            enable_gqa=heads != num_kv_heads,
        )
        return attended.reshape(num_requests, num_heads, head_dim)


def _attend_chunk(
    attention: Attention,
    chunk: _Chunk,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attended: torch.Tensor,
) -> None:
    """Attend with the chunk's queries (q, num_heads, head_dim) to its context (k, num_kv_heads, head_dim)."""
    num_kv_heads, head_dim = keys.shape[1:]
    num_shared = queries.shape[1] // num_kv_heads
    # K/V heads stand as the batch and the query heads that share one as its heads, so that K/V expand for nothing.
    by_head = queries.view(-1, num_kv_heads, num_shared, head_dim).permute(1, 2, 0, 3)
    targets = attended.view(-1, num_kv_heads, num_shared, head_dim).permute(1, 2, 0, 3)
    keys, values = (context.transpose(0, 1).unsqueeze(1).expand(-1, num_shared, -1, -1) for context in (keys, values))
    for block in chunk.blocks:
        context = slice(block.first_key, block.last_key)
        targets[:, :, block.start : block.stop] = attention(
            by_head[:, :, block.start : block.stop],
            keys[:, :, context],
            values[:, :, context],
            attn_mask=block.mask,
            is_causal=block.mask is None,
        )


class _Planner:
    """Turns one KV group's part of a batch into index tensors and masks. Works on the host, then moves the result."""

    def __init__(self, batch: Batch, group: GroupBatch, spec: PagedKV, block_size: int, device: torch.device) -> None:
        self._starts = batch.query_start_locs
        self._seq_lens = batch.seq_lens
        self._tables = group.block_tables
        self._slot_mapping = group.slot_mapping
        self._attention = choose_attention(spec)
        self._window = spec.sliding_window
        self._block_size = block_size
        self._device = device

    def plan(self) -> _GroupPlan:
        query_lens = np.diff(self._starts)
        return _GroupPlan(
            attention=self._attention,
            slot_mapping=self._to_device(self._slot_mapping),
            decodes=tuple(self._decodes(requests) for requests in self._similar(np.flatnonzero(query_lens == 1))),
            chunks=tuple(self._chunk(int(request)) for request in np.flatnonzero(query_lens > 1)),
        )

    def _similar(self, requests: Ints) -> list[Ints]:
        """Split requests so that padding within a part, and the memory that it gathers, are bounded."""
        visible = self._visible(requests)
        order = np.argsort(-visible, kind="stable")
        parts: list[list[int]] = []
        longest = 0
        for index in order:
            length = int(visible[index])
            is_like = longest - length <= max(64, longest // 4)
            if not parts or not is_like or (len(parts[-1]) + 1) * longest > _GATHERED_TOKENS[self._device.type]:
                parts.append([])
                longest = length
            parts[-1].append(int(requests[index]))
        return [np.array(part, dtype=np.int64) for part in parts]

    def _visible(self, requests: Ints) -> Ints:
        """Tokens that the last token of each request sees."""
        lengths = self._seq_lens[requests]
        return lengths if self._window is None else np.minimum(lengths, self._window)

    def _decodes(self, requests: Ints) -> _Decodes:
        visible = self._visible(requests)[:, None]  # (num_requests, 1)
        offsets = np.arange(visible.max())[None, :]  # (1, context)
        is_seen = offsets < visible
        positions = np.where(is_seen, self._seq_lens[requests][:, None] - visible + offsets, 0)
        slots = np.where(is_seen, self._slots(requests[:, None], positions), 0)
        mask = None if is_seen.all() else self._to_device(is_seen[:, None, None, :])
        return _Decodes(self._to_device(self._starts[requests]), self._to_device(slots.ravel()), mask)

    def _chunk(self, request: int) -> _Chunk:
        start, stop = int(self._starts[request]), int(self._starts[request + 1])
        num_queries, seq_len = stop - start, int(self._seq_lens[request])
        if num_queries == seq_len and (self._window is None or seq_len <= self._window):
            return _Chunk(start, stop, None, (_QueryBlock(0, num_queries, 0, seq_len, None),))
        first_position = seq_len - num_queries
        first_key = self._first_seen(first_position)
        blocks = tuple(
            self._query_block(block_start, min(block_start + _QUERY_BLOCK, num_queries), first_position, first_key)
            for block_start in range(0, num_queries, _QUERY_BLOCK)
        )
        slots = None
        if num_queries != seq_len:
            slots = self._to_device(self._slots(np.int64(request), np.arange(first_key, seq_len)))
        return _Chunk(start, stop, slots, blocks)

    def _query_block(self, start: int, stop: int, first_position: int, first_key: int) -> _QueryBlock:
        """Positions count within the request; the keys of the context start at position first_key."""
        first, last = self._first_seen(first_position + start), first_position + stop
        queries = torch.arange(first_position + start, last, device=self._device)[:, None]
        keys = torch.arange(first, last, device=self._device)[None, :]
        mask = keys <= queries
        if self._window is not None:
            mask &= keys > queries - self._window
        return _QueryBlock(start, stop, first - first_key, last - first_key, mask)

    def _first_seen(self, position: int) -> int:
        """The first position that a token at `position` sees."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _slots(self, requests: Ints | np.int64, positions: Ints) -> Ints:
        """Slots of positions of requests, broadcast against each other."""
        slots: Ints = self._tables[requests, positions // self._block_size] * self._block_size
        return slots + positions % self._block_size

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
