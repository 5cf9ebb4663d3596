"""The seam for libraries that attend to the prompts of a step in place of Weft's own kernel.

A library says which layers it supports, and gets the part of a step from its first prompt to its last one. One-token
requests in between count as prompts, which costs less than leaving them out; Weft's kernel overwrites their results. A
library plans a step on the host, so a CUDA graph cannot hold such a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.triton.attention_tiles import capability_of
from weft.engine.step.batch import Batch, GroupBatch, Ints

# Prompts that go on with fewer tokens have too few tiles for a GPU; Weft's kernel splits what they see.
_LEAST_TOKENS = 128


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


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
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
