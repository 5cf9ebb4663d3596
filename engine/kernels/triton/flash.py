"""Prefill of fresh prompts by torch's FlashAttention 2, where that is faster than Weft's own kernel.

A step qualifies in which no prompt goes on from an earlier step: all that its tokens see are then K/V of the step
itself, which lie side by side. Prompts that go on are left to Weft's kernel as a whole: most of what they see is in the
paged cache, and to merge two results by their log-sum-exp would take more code for the smaller part.

Dao: FlashAttention-2, 2023.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from weft.engine.cache.specs import PagedKV
from weft.engine.layers.attention import AttentionBackend
from weft.engine.run.config import EngineConfig
from weft.engine.run.dummy_batch import dummy_batch
from weft.engine.step.batch import Batch, Ints

logger = logging.getLogger(__name__)

FreshAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Queries (num_tokens, num_heads, head_dim), keys and values (num_tokens, num_kv_heads, head_dim), where each prompt
starts and the last one ends (num_prompts + 1,) int32, tokens of the longest -> (num_tokens, num_heads, head_dim)."""

_MEASURED_TOKENS = 2048
"""Of one prompt; of a step as many as there may be, so that the device takes longer than it takes to launch."""
_NUM_RUNS = 5


@dataclass(frozen=True, slots=True)
class FreshPrompts:
    """The part of a step from its first prompt to its last one.

    Attributes:
        tokens: Of the step. Requests of one token between the prompts are prompts of one token here, which costs less
            than to leave them out; what is computed for them is replaced.
        starts: (num_prompts + 1,) where each starts, counted from the first, and where the last one ends.
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
    """Whether FlashAttention 2 computes such layers: torch hands it no soft cap, and Weft no scale."""
    is_plain = spec.soft_cap is None and spec.scale is None
    return is_plain and dtype in (torch.float16, torch.bfloat16) and spec.head_dim <= 256 and spec.head_dim % 8 == 0


def flash_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, longest: int
) -> torch.Tensor:
    """See `FreshAttention`; what `torch.nn.attention.varlen.varlen_attn` calls, whose own signature still changes."""
    flash = torch.ops.aten._flash_attention_forward
    attended: torch.Tensor = flash(queries, keys, values, starts, starts, longest, longest, 0.0, True, False)[0]
    return attended


def is_faster(
    make_backend: Callable[[str, int], AttentionBackend],
    spec: PagedKV,
    num_heads: int,
    config: EngineConfig,
) -> bool:
    """Measure one layer's attention over fresh prompts, by Weft's kernel and by FlashAttention 2.

    Args:
        make_backend: Makes one for a layer with `spec` by what attends in prompts, triton or flash, and the number of
            its blocks.
    """
    longest = min(_MEASURED_TOKENS, config.max_model_len, spec.sliding_window or _MEASURED_TOKENS)
    num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * longest)
    batch = dummy_batch(num_tokens, (spec,), config.block_size, 1, longest)
    num_blocks = int(batch.groups[0].block_tables.max()) + 1
    sizes = num_heads, spec.num_kv_heads, spec.num_kv_heads
    qkv = torch.randn(num_tokens, sum(sizes), spec.head_dim, device=config.device).to(config.dtype)
    parts = qkv.split_with_sizes(sizes, dim=1)

    def shortest(choice: str) -> float:
        step = make_backend(choice, num_blocks).begin(batch)
        return min(_measure(lambda: step.attend(0, *parts)) for _ in range(_NUM_RUNS))

    own = shortest("triton")
    try:
        flash = shortest("flash")
    except RuntimeError as error:  # a build of torch without it, or for other GPUs
        logger.warning("FlashAttention 2 cannot be used: %s", error)
        return False
    named = "prompts of %d tokens, %d in all: a layer's attention takes Triton %.3f ms, FlashAttention 2 %.3f ms"
    logger.info(named, longest, num_tokens, own, flash)
    return flash < own


def _measure(call: Callable[[], object]) -> float:
    """Milliseconds on the device, once what the call compiles and queues has been done before."""
    call()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    call()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))
