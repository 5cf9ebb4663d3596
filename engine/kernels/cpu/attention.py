"""Weft's own attention on the CPU: paged, bfloat16, batch-invariant; see `engine/kernels/cpu/attention.c`.

One native call a layer writes the step's keys and values and attends. What all layers of a KV group share is planned
once a step. A row's result does not depend, bit for bit, on what else the step computes.
"""

import ctypes

import numpy as np
import torch

from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.memory import FirstTouch, allocate
from weft.engine.step.batch import Batch, Ints

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64

_ARRAYS = ("query_starts", "seq_lens", "block_tables", "slots")
"""Fields of a plan that point to arrays of int64."""

_BLOCK_TOKENS = 16
"""Blocks hold a multiple of so many tokens: the lanes of a vector of scores."""

_HEAD_VALUES, _MAX_HEAD_VALUES = 32, 256
"""Heads have a multiple of so many values, what one AMX product sums over, and at most eight times as many."""

_TOKENS_AHEAD = 8192
"""So many more tokens than have ever been cached have memory after some idle time: four full steps, by default."""


class _Plan(ctypes.Structure):
    """`Plan` of attention_plan.h: what the caller fills in, then what the kernels keep there."""

    _fields_ = (
        *((name, _SIZE) for name in ("num_requests", "num_tokens", "table_width", "block_size", "num_heads")),
        *((name, _SIZE) for name in ("num_kv_heads", "head_dim", "window")),
        ("scale", ctypes.c_double),
        *((name, _POINTER) for name in (*_ARRAYS, "memory")),
        ("memory_size", _SIZE),
        ("num_items", _SIZE),
        ("kept_by_the_kernels", _SIZE * 10),
    )


def supports(
    groups: tuple[CacheGroup[PagedKV], ...], block_size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the kernels can serve such a cache."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and block_size % _BLOCK_TOKENS == 0
        and all(group.spec.head_dim in range(_HEAD_VALUES, _MAX_HEAD_VALUES + 1, _HEAD_VALUES) for group in groups)
        and all(group.spec.soft_cap is None for group in groups)
    )


class NativeBackend:
    """Owns the cache: per layer keys and values, flat; attention.c says how a block lies there.

    Memory that no block has been written to takes none, but for some that idle time is spent on. The null block is
    never written to and stays zero.
    """

    name = "native"
    supports_graphs = False

    def __init__(
        self,
        groups: tuple[CacheGroup[PagedKV], ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        library: NativeLibrary,
    ) -> None:
        """Reserve the cache; `supports` must hold of the arguments."""
        assert supports(groups, block_size, dtype, device)
        self._groups = groups
        self._block_size = block_size
        self._caches: dict[int, torch.Tensor] = {}
        for group in groups:
            for layer in group.layers:
                self._caches[layer] = allocate(num_blocks * self._block_values(group), dtype)
        self._first_touches = [
            FirstTouch([self._caches[layer] for layer in group.layers], self._block_values(group) * dtype.itemsize)
            for group in groups
        ]
        self.pointers = {layer: cache.data_ptr() for layer, cache in self._caches.items()}
        # Kept, because fresh memory costs more than what is done with it (page faults).
        self._outputs = torch.empty(0, dtype=dtype)
        self._size_plan = library.function("weft_size_attention_plan", _POINTER)
        self._fill_plan = library.function("weft_plan_attention", _POINTER)
        rows = (_POINTER, _SIZE)
        self._attend = library.function("weft_attend", _POINTER, _POINTER, *rows, *rows, *rows, _POINTER)

    def begin(self, batch: Batch) -> "NativeStep":
        """Copy the blocks that the batch asks for, and ask for memory that later ones will want."""
        for group, first_touch, group_batch in zip(self._groups, self._first_touches, batch.groups, strict=True):
            slots = group_batch.slot_mapping
            first_touch.approach(int(slots.max()) // self._block_size, len(slots) / self._block_size)
            self._copy_blocks(group, group_batch.block_copies)
        return NativeStep(self, batch)

    def prepare(self) -> bool:
        """Ask for a page of memory that later steps will write to."""
        num_blocks = _TOKENS_AHEAD // self._block_size
        return any(first_touch.ask_in_idle_time(num_blocks) for first_touch in self._first_touches)

    def plan(self, batch: Batch, layer: int, num_heads: int) -> "_GroupPlan":
        """Plan a step for the KV group of a layer."""
        index = next(index for index, group in enumerate(self._groups) if layer in group.layers)
        spec, group_batch = self._groups[index].spec, batch.groups[index]
        given = (batch.query_start_locs, batch.seq_lens, group_batch.block_tables, group_batch.slot_mapping)
        arrays = tuple(np.ascontiguousarray(array, np.int64) for array in given)
        plan = _Plan(
            num_requests=batch.num_requests,
            num_tokens=batch.num_tokens,
            table_width=group_batch.block_tables.shape[1],
            block_size=self._block_size,
            num_heads=num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.sliding_window or 0,
            scale=spec.score_scale,
            **dict(zip(_ARRAYS, (array.ctypes.data for array in arrays), strict=True)),
        )
        self._size_plan(ctypes.addressof(plan))
        memory = np.empty(plan.memory_size, np.int32)
        plan.memory = memory.ctypes.data
        self._fill_plan(ctypes.addressof(plan))
        return _GroupPlan(plan, (*arrays, memory), self._groups[index].layers)

    def attend(
        self, plan: int, cache: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Write K/V, then attend, by pointers to plan and cache; shapes as in `AttentionStep.attend`."""
        if queries.numel() > self._outputs.numel():
            self._outputs = torch.empty(queries.numel(), dtype=torch.bfloat16)
        inputs = (*_rows(queries), *_rows(keys), *_rows(values))
        self._attend(plan, cache, *inputs, self._outputs.data_ptr())
        return self._outputs[: queries.numel()].view(queries.shape)

    def _copy_blocks(self, group: CacheGroup[PagedKV], copies: Ints) -> None:
        if not len(copies):
            return
        sources, targets = torch.from_numpy(copies).unbind(1)
        for layer in group.layers:
            blocks = self._caches[layer].view(-1, self._block_values(group))
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))

    def _block_values(self, group: CacheGroup[PagedKV]) -> int:
        """Values of a block in one layer, K and V."""
        return 2 * self._block_size * group.spec.num_kv_heads * group.spec.head_dim


class _GroupPlan:
    """What all layers of a KV group share in a step, and the arrays that it points into."""

    def __init__(self, plan: _Plan, arrays: tuple[np.ndarray, ...], layers: tuple[int, ...]) -> None:
        self.address = ctypes.addressof(plan)
        self.layers = layers
        self._kept = plan, arrays


class NativeStep:
    """Attention for one step; see `AttentionStep`."""

    def __init__(self, backend: NativeBackend, batch: Batch) -> None:
        """Plans are made when the first layer of a group comes, for that tells the number of query heads."""
        self._backend = backend
        self._batch = batch
        self._plans: dict[int, _GroupPlan] = {}

    def cache(self, layer: int) -> None:
        """Nothing: `attend` writes."""

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write K/V, then attend; shapes as in `AttentionStep.attend`."""
        return self._backend.attend(*self.place(layer, queries.shape[1]), queries, keys, values)

    def place(self, layer: int, num_heads: int) -> tuple[int, int]:
        """Return where the plan of a layer lies, for this step, and where its cache does."""
        if layer not in self._plans:
            plan = self._backend.plan(self._batch, layer, num_heads)
            self._plans.update(dict.fromkeys(plan.layers, plan))
        return self._plans[layer].address, self._backend.pointers[layer]


def _rows(heads: torch.Tensor) -> tuple[int, int]:
    """Where the heads of the first token start, and how many values lie between two tokens."""
    token_stride, head_stride, stride = heads.stride()
    assert stride == 1 and head_stride == heads.shape[2], "the heads of a token must lie side by side"
    return heads.data_ptr(), token_stride
