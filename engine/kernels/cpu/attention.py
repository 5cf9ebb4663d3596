"""Weft's own attention on the CPU: paged, bfloat16 over a cache in that or in int8, batch-invariant; see attention.c.

One native call per layer writes the step's keys and values, then attends. What all layers of a KV group share is
planned once per step. The bits of a row's result do not depend on what else the step computes.
"""

import ctypes
import math

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from weft.engine.batch import Batch, Ints
from weft.engine.cache.specs import CacheGroup, PagedGroups, PagedKV
from weft.engine.kernels.cpu.library import FirstTouch, NativeLibrary, allocate
from weft.engine.layers.block import AttentionBackend, AttentionStep, Heads

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64

# Fields of a plan that point to arrays of int64.
_ARRAYS = ("query_starts", "seq_lens", "block_tables", "slots")

# A block holds a multiple of this many tokens: the lanes of a vector of scores.
_BLOCK_TOKENS = 16

# A head has a multiple of this many values, which one AMX product sums over, and at most the second number.
_HEAD_VALUES, _MAX_HEAD_VALUES = 32, 640

# Idle time asks for memory for this many tokens beyond the most ever cached: four full steps, by default.
_TOKENS_AHEAD = 8192


class _Plan(ctypes.Structure):
    """`Plan` of attention_plan.h: fields that the caller fills in, then fields for the kernels.

    Attributes:
        arrays: Kept alive, because the plan points to them.
    """

    arrays: tuple[np.ndarray, ...]

    _fields_ = (
        *((name, _SIZE) for name in ("num_requests", "num_tokens", "table_width", "block_size", "num_heads")),
        *((name, _SIZE) for name in ("num_kv_heads", "head_dim", "value_dim", "window", "span")),
        *((name, _SIZE) for name in ("is_latent", "ahead", "is_rounded")),
        *((name, ctypes.c_double) for name in ("scale", "soft_cap")),
        *((name, _POINTER) for name in ("slopes", *_ARRAYS, "memory")),
        ("memory_size", _SIZE),
        ("num_items", _SIZE),
        ("kept_by_the_kernels", _SIZE * 10),
    )


def supports(
    groups: PagedGroups, block_size: int, dtype: torch.dtype, device: torch.device, cache_dtype: torch.dtype
) -> bool:
    """Whether the kernels can serve such a cache. Latents are never rounded: they are keys and values at once."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and block_size % _BLOCK_TOKENS == 0
        and (cache_dtype == dtype or (cache_dtype == torch.int8 and not any(g.spec.latent_dim for g in groups)))
        and all(_fits(group.spec) for group in groups)
    )


def _fits(spec: PagedKV) -> bool:
    return spec.head_dim <= _MAX_HEAD_VALUES and not (spec.head_dim % _HEAD_VALUES or spec.value_dim % _HEAD_VALUES)


class NativeBackend(AttentionBackend):
    """Owns the cache: keys and values of each layer, flat; attention.c describes the layout of a block.

    A page takes memory when a step first writes to it, or a little earlier in idle time. The null block is never
    written and stays zero.
    """

    name = "native"
    supports_graphs = False

    def __init__(
        self,
        groups: PagedGroups,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        library: NativeLibrary,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """Reserve the cache, of another dtype if that is given. `supports` must hold for the arguments."""
        self._cache_dtype = cache_dtype or dtype
        assert supports(groups, block_size, dtype, device, self._cache_dtype)
        self._groups = groups
        self._block_size = block_size
        self._caches = {
            layer: allocate(num_blocks * self._block_values(group), self._cache_dtype)
            for group in groups
            for layer in group.layers
        }
        self._first_touches = [
            FirstTouch([self._caches[layer] for layer in group.layers], self._block_bytes(group)) for group in groups
        ]
        self.pointers = {layer: cache.data_ptr() for layer, cache in self._caches.items()}
        # Kept, because the page faults of fresh memory cost more than the work in it.
        self._outputs = torch.empty(0, dtype=dtype)
        self._size_plan = library.function("weft_size_attention_plan", _POINTER)
        self._fill_plan = library.function("weft_plan_attention", _POINTER)
        rows = (_POINTER, _SIZE)
        last = (_POINTER, _POINTER, _SIZE, _POINTER)
        self._attend = library.function("weft_attend", _POINTER, _POINTER, *rows, *rows, *rows, *last)

    @override
    def begin(self, batch: Batch) -> "NativeStep":
        for group, first_touch, group_batch in zip(self._groups, self._first_touches, batch.groups, strict=True):
            slots = group_batch.slot_mapping
            first_touch.approach(int(slots.max()) // self._block_size, len(slots) / self._block_size)
            self._copy_blocks(group, group_batch.block_copies)
        return NativeStep(self, batch)

    @override
    def blocks(self, layer: int) -> tuple[Tensor, ...]:
        (group,) = (group for group in self._groups if layer in group.layers)
        return (self._caches[layer].view(-1, self._block_values(group)),)

    @override
    def prepare(self) -> bool:
        num_blocks = _TOKENS_AHEAD // self._block_size
        return any(first_touch.ask_in_idle_time(num_blocks) for first_touch in self._first_touches)

    def plan(self, batch: Batch, layer: int, num_heads: int) -> dict[int, _Plan]:
        """Plan a step for the KV group of a layer; returns the plan by layer."""
        pairs = zip(self._groups, batch.groups, strict=True)
        group, group_batch = next(pair for pair in pairs if layer in pair[0].layers)
        spec = group.spec.part(batch.inputs is not None, batch.is_mutual)
        given = (batch.query_start_locs, batch.seq_lens, group_batch.block_tables, group_batch.slot_mapping)
        arrays = tuple(np.ascontiguousarray(array, np.int64) for array in given)
        slopes = np.array(spec.slopes, np.float32)
        plan = _Plan(
            num_requests=batch.num_requests,
            num_tokens=batch.num_tokens,
            table_width=group_batch.block_tables.shape[1],
            block_size=self._block_size,
            num_heads=num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            is_latent=spec.latent_dim is not None,
            window=spec.sliding_window or 0,
            span=spec.span or 0,
            ahead=spec.num_ahead,
            is_rounded=self._cache_dtype == torch.int8,
            scale=spec.score_scale,
            soft_cap=spec.soft_cap or 0.0,
            slopes=slopes.ctypes.data if len(slopes) else None,
            **dict(zip(_ARRAYS, (array.ctypes.data for array in arrays), strict=True)),
        )
        self._size_plan(ctypes.addressof(plan))
        memory = np.empty(plan.memory_size, np.int32)
        plan.memory = memory.ctypes.data
        self._fill_plan(ctypes.addressof(plan))
        plan.arrays = (*arrays, slopes, memory)
        return dict.fromkeys(group.layers, plan)

    def attend(
        self,
        plan: int,
        cache: int,
        queries: Tensor | None,
        keys: Tensor | None,
        values: Tensor | None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
        value_dim: int = 0,
    ) -> Tensor:
        """Write K/V, then attend, by pointers to plan and cache; shapes as in `AttentionStep.attend`.

        Without keys nothing is written, without queries nothing attends.
        """
        shape = (*queries.shape[:2], value_dim or queries.shape[2]) if queries is not None else (0,)
        num_values = math.prod(shape)
        if num_values > self._outputs.numel():
            self._outputs = torch.empty(num_values, dtype=torch.bfloat16)
        inputs = (*_rows(queries), *_rows(keys), *_rows(values))
        biases = (None, 0) if bias is None else (bias.data_ptr(), bias.shape[1] // 2)
        sinks_pointer = None if sinks is None else sinks.data_ptr()
        self._attend(plan, cache, *inputs, sinks_pointer, *biases, self._outputs.data_ptr())
        return self._outputs[:num_values].view(shape)

    def _copy_blocks(self, group: CacheGroup[PagedKV], copies: Ints) -> None:
        if not len(copies):
            return
        sources, targets = torch.from_numpy(copies).unbind(1)
        for layer in group.layers:
            blocks = self._caches[layer].view(-1, self._block_values(group))
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))

    def _block_values(self, group: CacheGroup[PagedKV]) -> int:
        """Values of a block in one layer; scales count by their bytes."""
        return self._block_bytes(group) // self._cache_dtype.itemsize

    def _block_bytes(self, group: CacheGroup[PagedKV]) -> int:
        return group.spec.bytes_per_block(self._block_size, self._cache_dtype)


class NativeStep(AttentionStep):
    """Attention for one step."""

    def __init__(self, backend: NativeBackend, batch: Batch) -> None:
        """Plan nothing yet: only a layer knows the number of its query heads."""
        self._backend = backend
        self._batch = batch
        self._plans: dict[int, _Plan] = {}

    @override
    def cache(self, layer: int) -> None:
        return None

    @override
    def attend(self, layer: int, heads: Heads, sinks: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        addresses = self.addresses(layer, heads[0].shape[1])
        return self._backend.attend(*addresses, *heads, sinks, bias, heads[2].shape[2])

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write K/V of the step's tokens."""
        self._backend.attend(*self.addresses(layer, keys.shape[1]), None, keys, values)

    def read(self, layer: int, queries: Tensor) -> Tensor:
        """Attend to what is written."""
        return self._backend.attend(*self.addresses(layer, queries.shape[1]), queries, None, None)

    def addresses(self, layer: int, num_heads: int) -> tuple[int, int]:
        """Addresses of a layer's plan, made for this step, and of its cache."""
        if layer not in self._plans:
            self._plans.update(self._backend.plan(self._batch, layer, num_heads))
        return ctypes.addressof(self._plans[layer]), self._backend.pointers[layer]


def _rows(heads: Tensor | None) -> tuple[int | None, int]:
    """Address of the first token's heads, and the number of values from one token to the next; None for none."""
    if heads is None:
        return None, 0
    token_stride, head_stride, stride = heads.stride()
    assert stride == 1 and (heads.shape[1] == 1 or head_stride == heads.shape[2]), (
        "the heads of a token must be contiguous"
    )
    return heads.data_ptr(), token_stride
