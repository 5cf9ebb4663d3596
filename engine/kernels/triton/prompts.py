"""Libraries that attend to the prompts of a step in place of Weft's own kernel, and the seam between them and Weft.

A library says which layers it supports, and gets the part of a step from its first prompt to its last one. One-token
requests in between count as prompts, which costs less than leaving them out; Weft's kernel overwrites their results. A
library plans a step on the host, so a CUDA graph cannot hold such a step.
"""

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from weft.engine.batch import Batch, GroupBatch, Ints
from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.device import mark, to_device
from weft.engine.kernels.triton.attention_tiles import capability_of


@dataclass(frozen=True, slots=True)
class PromptLayers:
    """The layers of a KV group, as a library has to compute them.

    Attributes:
        num_heads: Query heads.
        dtype: Of queries, keys, values and results.
        cache_dtype: Of K/V in the cache.
        block_size: Tokens in a block of the cache.
        capability: Compute capability of the GPU.
    """

    spec: PagedKV
    num_heads: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    capability: tuple[int, int]

    @property
    def is_plain(self) -> bool:
        """Whether libraries know such attention, and a type that they compute in."""
        return self.spec.is_plain and self.dtype in (torch.float16, torch.bfloat16)

    @property
    def window_left(self) -> int:
        """Tokens before itself that a token sees, as libraries count them; -1 for all."""
        return -1 if self.spec.sliding_window is None else self.spec.sliding_window - 1


def prompt_layers(
    groups: Sequence[CacheGroup[PagedKV]],
    num_heads: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    device: torch.device,
) -> list[PromptLayers]:
    """The layers of each KV group on a device."""
    capability = capability_of(device)
    return [
        PromptLayers(g.spec, g.spec.num_heads or num_heads, dtype, cache_dtype, block_size, capability) for g in groups
    ]


@dataclass(frozen=True, slots=True)
class Prompts:
    """The part of a step from its first prompt to its last one, for one KV group.

    Attributes:
        tokens: Range of the step's tokens.
        starts: (num_prompts + 1,) start of each prompt, counted from the first one, and end of the last.
        longest: Tokens of the longest prompt.
        seq_lens: (num_prompts,) tokens in the cache after this step.
        block_tables: (num_prompts, max_num_blocks) see `GroupBatch`.
        are_fresh: Whether all prompts begin in this step, so that they see only K/V of the step itself.
    """

    tokens: slice
    starts: Ints
    longest: int
    seq_lens: Ints
    block_tables: Ints
    are_fresh: bool


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Attends in one layer.

- queries: (num_tokens, num_heads, head_dim) of the range `PromptStep.tokens`
- keys, values: (num_tokens, num_kv_heads, head_dim)
- cache: (num_blocks, 2, num_kv_heads, block_size, head_dim), which has the step's keys and values already
- starts: (num_prompts + 1,) int32, those of `PromptStep` on the device

Returns (num_tokens, num_heads, head_dim).
"""


@dataclass(frozen=True, slots=True)
class PromptStep:
    """A step as planned by a library; tokens and starts as in `Prompts`."""

    tokens: slice
    starts: Ints
    attend: Attend


class PromptAttention(Protocol):
    """A library. Its constructor imports it, and fails if it is not installed as it should be.

    Attributes:
        name: For settings and the log.
        needs: What `supports` asks for, in words.
    """

    name: str
    needs: str

    def supports(self, layers: PromptLayers) -> bool:
        """Whether it computes the prompts of such layers."""

    def begin(self, prompts: Prompts, layers: PromptLayers) -> PromptStep | None:
        """Plan a step without waiting for the device; None leaves it to Weft's kernel."""


# Prompts that go on with fewer tokens have too few tiles for a GPU; Weft's kernel splits what they see.
_LEAST_TOKENS = 128


def find_prompts(batch: Batch, group: GroupBatch) -> Prompts | None:
    """The prompts of a step; None if there are none, or if they go on with so few tokens that Weft's kernel is best."""
    query_lens = np.diff(batch.query_start_locs)
    prompts = np.flatnonzero(query_lens > 1)
    if not len(prompts):
        return None
    longest = int(query_lens[prompts].max())
    are_fresh = bool((batch.seq_lens[prompts] == query_lens[prompts]).all())
    if not are_fresh and longest < _LEAST_TOKENS:
        return None
    first, stop = prompts[0], prompts[-1] + 1
    starts = batch.query_start_locs[first : stop + 1]
    return Prompts(
        slice(int(starts[0]), int(starts[-1])),
        starts - starts[0],
        longest,
        batch.seq_lens[first:stop],
        group.block_tables[first:stop],
        are_fresh,
    )


class FlashAttention2:
    """Attention to new prompts by torch's FlashAttention 2 (Dao, 2023); see `PromptAttention`.

    A step qualifies if none of its prompts continues from an earlier step. Its tokens then see only K/V of the step
    itself, which lie side by side. If one prompt continues, Weft's kernel computes all: most of what such a prompt sees
    is in the paged cache, which torch's function does not read.
    """

    name = "flash2"
    needs = (
        "plain attention in bfloat16 or float16, heads of at most 256 values, a multiple of 8, and scores without a "
        "soft cap or a scale of their own"
    )

    def supports(self, layers: PromptLayers) -> bool:
        """Soft caps and scales are left out: torch passes no cap."""
        spec = layers.spec
        is_plain = layers.is_plain and spec.soft_cap is None and spec.scale is None
        return is_plain and layers.capability >= (8, 0) and spec.head_dim <= 256 and spec.head_dim % 8 == 0

    def begin(self, prompts: Prompts, layers: PromptLayers) -> PromptStep | None:
        """Take fresh prompts, if none is longer than the sliding window."""
        window, longest = layers.spec.sliding_window, prompts.longest
        if not prompts.are_fresh or (window is not None and longest > window):
            return None

        def attend(queries: Tensor, keys: Tensor, values: Tensor, cache: Tensor, starts: Tensor) -> Tensor:
            # `torch.nn.attention.varlen.varlen_attn` calls the same; its signature still changes.
            flash = torch.ops.aten._flash_attention_forward
            attended: Tensor = flash(queries, keys, values, starts, starts, longest, longest, 0.0, True, False)[0]
            return attended

        return PromptStep(prompts.tokens, prompts.starts, attend)


_HOPPER = 9

# With blocks of the size of its tiles, which have at least 64 keys, it would read a block in bulk. What is behind the
# end of a context is then multiplied by 0, which does not hide a not-a-number.
_LEAST_TILE_KEYS = 64


class _VarlenFunction(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> Tensor: ...


class _CacheFunction(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> Tensor: ...


class FlashAttention3:
    """FlashAttention 3 (Shah et al., 2024) for Hopper, from the package flash_attn_3; see `PromptAttention`.

    Its own functions are called, not torch's `activate_flash_attention_impl`: that would replace FlashAttention 2 in
    the whole process, passes no soft cap, and fits one version of the package. Prompts that all begin in the step are
    computed from the step's own K/V, which are read in bulk; prompts that go on from the cache, block by block.
    """

    name = "flash3"
    needs = (
        "a Hopper GPU, plain attention in bfloat16 or float16 and the same in the cache, heads of at most 256 values, "
        "a multiple of 8, and blocks of less than 64 tokens"
    )

    def __init__(self, device: torch.device) -> None:
        """Import the package, of September 2025 or later.

        Raises:
            ImportError: It is not installed, or not for this torch.
        """
        module = importlib.import_module("flash_attn_interface")
        self._attend_varlen: _VarlenFunction = module.flash_attn_varlen_func
        self._attend_cache: _CacheFunction = module.flash_attn_with_kvcache
        self._device = device

    def supports(self, layers: PromptLayers) -> bool:
        """It converts nothing, so the cache has the queries' type."""
        is_plain = layers.is_plain and layers.cache_dtype == layers.dtype
        fits = layers.spec.head_dim <= 256 and layers.spec.head_dim % 8 == 0 and layers.block_size < _LEAST_TILE_KEYS
        return is_plain and fits and layers.capability[0] == _HOPPER

    def begin(self, prompts: Prompts, layers: PromptLayers) -> PromptStep:
        """Take any prompts."""
        attend = self._fresh(prompts, layers) if prompts.are_fresh else self._paged(prompts, layers)
        return PromptStep(prompts.tokens, prompts.starts, attend)

    def _fresh(self, prompts: Prompts, layers: PromptLayers) -> Attend:
        def attend(queries: Tensor, keys: Tensor, values: Tensor, cache: Tensor, starts: Tensor) -> Tensor:
            return self._attend_varlen(
                *(queries, keys, values, starts, starts, prompts.longest, prompts.longest),
                softmax_scale=layers.spec.score_scale,
                causal=True,
                window_size=(layers.window_left, 0),
                softcap=layers.spec.soft_cap or 0.0,
            )

        return attend

    def _paged(self, prompts: Prompts, layers: PromptLayers) -> Attend:
        """The package wants (num_blocks, block_size, num_kv_heads, head_dim), with any strides."""
        arrays = prompts.seq_lens, prompts.block_tables
        seq_lens, tables = (to_device(array.astype(np.int32), self._device) for array in arrays)

        def attend(queries: Tensor, keys: Tensor, values: Tensor, cache: Tensor, starts: Tensor) -> Tensor:
            cached_keys, cached_values = (side.transpose(1, 2) for side in cache.unbind(1))
            return self._attend_cache(
                *(queries, cached_keys, cached_values),
                cache_seqlens=seq_lens,
                page_table=tables,
                cu_seqlens_q=starts,
                max_seqlen_q=prompts.longest,
                softmax_scale=layers.spec.score_scale,
                causal=True,
                window_size=(layers.window_left, 0),
                softcap=layers.spec.soft_cap or 0.0,
            )

        return attend


# What FlashInfer advises. It is for parts of split contexts, and nothing is split here.
_WORKSPACE_BYTES = 128 << 20

# As many as steps are in flight.
_NUM_WRAPPERS = 2

_HEAD_DIMS = (64, 128, 256)


class _Wrapper(Protocol):
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        disable_split_kv: bool,
    ) -> None: ...

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor: ...


@dataclass(slots=True)
class _Planner:
    """A wrapper and the event after its last plan was copied; only `FlashInfer.begin` changes it."""

    wrapper: _Wrapper
    copied: torch.cuda.Event | None = None


class FlashInfer:
    """FlashInfer (Ye et al., 2025), which reads Weft's cache as it is; see `PromptAttention`.

    A wrapper plans a step on the host and runs in each layer of a KV group. Its plan goes to the device from pinned
    memory that the wrapper owns and the next plan overwrites. So the groups have several wrappers in turn, and a
    wrapper plans again once its last copy has ended, which it has unless three steps are in flight.
    """

    name = "flashinfer"
    needs = "plain attention in bfloat16 or float16 and the same in the cache, and heads of 64, 128 or 256 values"

    def __init__(self, device: torch.device) -> None:
        """Import the package, 0.4 or later, and allocate its workspace.

        Raises:
            ImportError: It is not installed.
        """
        self._module = importlib.import_module("flashinfer")
        self._device = device
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planners: dict[PromptLayers, Iterator[_Planner]] = {}

    def supports(self, layers: PromptLayers) -> bool:
        """The cache has the queries' type: a kernel for both types at once is not the one for Hopper."""
        is_plain = layers.is_plain and layers.cache_dtype == layers.dtype
        return is_plain and layers.spec.head_dim in _HEAD_DIMS and layers.capability >= (8, 0)

    def begin(self, prompts: Prompts, layers: PromptLayers) -> PromptStep:
        """Take any prompts. Waits for the device only if more steps are in flight than there are wrappers."""
        if layers not in self._planners:
            self._planners[layers] = itertools.cycle([self._new_planner() for _ in range(_NUM_WRAPPERS)])
        planner = next(self._planners[layers])
        if planner.copied:
            planner.copied.synchronize()
        num_blocks = -(-prompts.seq_lens // layers.block_size)
        is_used = np.arange(prompts.block_tables.shape[1]) < num_blocks[:, None]
        planner.wrapper.plan(
            self._pinned(prompts.starts),
            self._pinned(np.cumsum([0, *num_blocks])),
            self._pinned(prompts.block_tables[is_used]),
            self._pinned(prompts.seq_lens - (num_blocks - 1) * layers.block_size),
            layers.num_heads,
            layers.spec.num_kv_heads,
            layers.spec.head_dim,
            layers.block_size,
            causal=True,
            sm_scale=layers.spec.score_scale,
            window_left=layers.window_left,
            logits_soft_cap=layers.spec.soft_cap or 0.0,
            q_data_type=layers.dtype,
            kv_data_type=layers.cache_dtype,
            disable_split_kv=True,  # parts of many heads take more memory than the workspace has
        )
        planner.copied = mark(self._device)
        run = planner.wrapper.run
        return PromptStep(prompts.tokens, prompts.starts, lambda queries, k, v, cache, starts: run(queries, cache))

    def _new_planner(self) -> _Planner:
        return _Planner(self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="HND"))

    def _pinned(self, array: Ints) -> Tensor:
        """An int32 tensor on the host, which the wrapper reads there and copies to the device without waiting."""
        tensor = torch.from_numpy(array.astype(np.int32))
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


def installed_libraries(device: torch.device) -> dict[str, Callable[[], PromptAttention]]:
    """Constructors by name, which import a library; any exception there means that it cannot be used."""
    libraries: dict[str, Callable[[], PromptAttention]] = {FlashAttention2.name: FlashAttention2}
    if find_spec("flash_attn_interface"):
        libraries[FlashAttention3.name] = lambda: FlashAttention3(device)
    # Without the package of compiled kernels, FlashInfer compiles them when they are first used.
    if find_spec("flashinfer") and find_spec("flashinfer_jit_cache"):
        libraries[FlashInfer.name] = lambda: FlashInfer(device)
    return libraries
