"""What the reference attends with: torch's scaled_dot_product_attention, or, for soft-capped scores, what stands in.

torch's operation cannot cap scores between their scaling and their softmax. The stand-in takes the same arguments and
computes in float32, some queries at a time, so that scores stay small.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from weft.engine.cache.specs import PagedKV

Attention = Callable[..., torch.Tensor]
"""Takes queries (n, num_heads, q, head_dim), keys and values (n, num_kv_heads, k, head_dim), attn_mask, is_causal and
enable_gqa as `torch.nn.functional.scaled_dot_product_attention` does; returns the shape of queries."""

_QUERY_BLOCK = 128
"""Queries whose scores are kept at a time."""


def choose_attention(spec: PagedKV) -> Attention:
    """The operation for layers of this spec."""
    if spec.soft_cap is None:
        return partial(F.scaled_dot_product_attention, scale=spec.scale)
    return partial(_soft_capped_attention, scale=spec.score_scale, soft_cap=spec.soft_cap)


def _soft_capped_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """See `Attention`; a mask is (..., q, k), true where a query sees a key."""
    batch, num_heads, num_queries, head_dim = queries.shape
    num_kv_heads = keys.size(1)
    assert enable_gqa or num_heads == num_kv_heads
    keys, values = keys.float().mT, values.float()
    outputs = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for start in range(0, num_queries, _QUERY_BLOCK):
        rows = slice(start, start + _QUERY_BLOCK)
        block = queries[:, :, rows].float() * scale
        # The queries of all heads that share a K/V head stand in one matrix; K/V are repeated only where callers do so.
        shared = block.reshape(batch, num_kv_heads, -1, head_dim)
        scores = (shared @ keys).div_(soft_cap).tanh_().mul_(soft_cap).view(*block.shape[:3], -1)  # (n, heads, q, k)
        if is_causal:
            last = torch.arange(start, start + block.size(2), device=block.device)[:, None]
            scores.masked_fill_(torch.arange(scores.size(3), device=block.device) > last, float("-inf"))
        elif attn_mask is not None:
            scores.masked_fill_(~attn_mask[..., rows, :], float("-inf"))
        weights = scores.softmax(-1).view(*shared.shape[:3], -1)
        outputs[:, :, rows] = (weights @ values).view(block.shape)
    return outputs
