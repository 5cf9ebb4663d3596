"""Attention to new prompts by torch's FlashAttention 2 (Dao, 2023), if faster than Weft's own kernel.

A step qualifies if none of its prompts continues from an earlier step. Its tokens then see only K/V of the step itself,
which lie side by side. If one prompt continues, Weft's kernel computes all: most of what such a prompt sees is in the
paged cache, and merging two results by their log-sum-exp would take more code for the smaller part.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from weft.engine.cache.specs import PagedKV
from weft.engine.step.batch import Batch, Ints

# Takes queries (num_tokens, num_heads, head_dim), keys and values (num_tokens, num_kv_heads, head_dim), the start of
# each prompt and the end of the last (num_prompts + 1,) int32, and the tokens of the longest prompt. Returns
# (num_tokens, num_heads, head_dim).
FreshAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class FreshPrompts:
    """The part of a step from its first prompt to its last one.

    Attributes:
        tokens: Range of the step's tokens. A one-token request between the prompts counts as a prompt, which costs less
            than leaving it out; its result is overwritten later.
        starts: (num_prompts + 1,) start of each prompt, counted from the first one, and end of the last.
        longest: Tokens of the longest prompt.
    """

    tokens: slice
    starts: Ints
    longest: int


def find_fresh_prompts(batch: Batch, window: int | None) -> FreshPrompts | None:
    """Return the prompts of a step, if all of them begin in it and none is longer than the sliding window."""
    query_lens = np.diff(batch.query_start_locs)
    prompts = np.flatnonzero(query_lens > 1)
    if not len(prompts) or (batch.seq_lens[prompts] > query_lens[prompts]).any():
        return None
    longest = int(query_lens[prompts].max())
    if window is not None and longest > window:
        return None
    starts = batch.query_start_locs[prompts[0] : prompts[-1] + 2]
    return FreshPrompts(slice(int(starts[0]), int(starts[-1])), starts - starts[0], longest)


def supports(spec: PagedKV, dtype: torch.dtype) -> bool:
    """Whether FlashAttention 2 computes such layers. torch gives it no soft cap, and Weft gives it no scale."""
    is_plain = spec.soft_cap is None and spec.scale is None
    return is_plain and dtype in (torch.float16, torch.bfloat16) and spec.head_dim <= 256 and spec.head_dim % 8 == 0


NEEDS = (
    "dtype bfloat16 or float16, heads of at most 256 values, a multiple of 8, scores without a soft cap or a scale of "
    "their own, and not deterministic"
)
"""What `supports` asks for, in words."""


def flash_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, longest: int
) -> torch.Tensor:
    """See `FreshAttention`. `torch.nn.attention.varlen.varlen_attn` calls the same, but its signature still changes."""
    flash = torch.ops.aten._flash_attention_forward
    attended: torch.Tensor = flash(queries, keys, values, starts, starts, longest, longest, 0.0, True, False)[0]
    return attended
