"""Attention to prompts by FlashInfer (Ye et al., 2025), an optional package, which reads Weft's cache as it is.

A wrapper plans a step on the host and runs in each layer of a KV group. Its plan goes to the device from pinned memory
that the wrapper owns and the next plan overwrites. So the groups have several wrappers in turn, and a wrapper plans
again once its last copy has ended, which it has unless three steps are in flight.
"""

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from weft.engine.kernels.triton.prompt_attention import PromptLayers, Prompts, PromptStep
from weft.engine.step.batch import Ints
from weft.engine.step.transfer import mark

# What FlashInfer advises. It is for parts of split contexts, and nothing is split here.
_WORKSPACE_BYTES = 128 << 20

# As many as steps are in flight.
_NUM_WRAPPERS = 2

_HEAD_DIMS = (64, 128, 256)


class _Wrapper(Protocol):
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
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

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor: ...


@dataclass(slots=True)
class _Planner:
    """A wrapper and the event after its last plan was copied; only `FlashInfer.begin` changes it."""

    wrapper: _Wrapper
    copied: torch.cuda.Event | None = None


class FlashInfer:
    """See `PromptAttention`."""

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

    def _pinned(self, array: Ints) -> torch.Tensor:
        """An int32 tensor on the host, which the wrapper reads there and copies to the device without waiting."""
        tensor = torch.from_numpy(array.astype(np.int32))
        return tensor.pin_memory() if self._device.type == "cuda" else tensor
