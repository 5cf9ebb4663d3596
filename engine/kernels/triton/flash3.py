"""Attention to prompts by FlashAttention 3 (Shah et al., 2024) for Hopper, from the optional package flash_attn_3.

Its own functions are called, not torch's `activate_flash_attention_impl`: that would replace FlashAttention 2 in the
whole process, passes no soft cap, and fits one version of the package. Prompts that all begin in the step are
computed from the step's own K/V, which are read in bulk; prompts that go on from the cache, block by block.
"""

import importlib
from typing import Protocol

import numpy as np
import torch

from weft.engine.kernels.triton.prompt_attention import Attend, PromptLayers, Prompts, PromptStep
from weft.engine.step.transfer import to_device

_HOPPER = 9

# With blocks of the size of its tiles, which have at least 64 keys, it would read a block in bulk. What is behind the
# end of a context is then multiplied by 0, which does not hide a not-a-number.
_LEAST_TILE_KEYS = 64


class _VarlenFunction(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> torch.Tensor: ...


class _CacheFunction(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> torch.Tensor: ...


class FlashAttention3:
    """See `PromptAttention`."""

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
        def attend(
            queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, starts: torch.Tensor
        ) -> torch.Tensor:
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
        seq_lens, tables = (
            to_device(array.astype(np.int32), self._device) for array in (prompts.seq_lens, prompts.block_tables)
        )

        def attend(
            queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, starts: torch.Tensor
        ) -> torch.Tensor:
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
