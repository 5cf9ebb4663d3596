"""Attention among the tokens of whole texts by torch's fused kernel: one call for all texts of one length.

For encoders, whose requests are computed whole in one step and whose keys and values no later step reads: nothing is
cached, and nothing is padded.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from weft.engine.cache.specs import PagedKV
from weft.engine.step.batch import Batch


@dataclass(frozen=True, slots=True)
class EqualTexts:
    """The texts of one length in a step.

    Attributes:
        tokens: (num_texts, length) indices of their tokens in the step.
        is_seen: (length, length) which tokens each token sees; None for all.
    """

    tokens: torch.Tensor
    is_seen: torch.Tensor | None


def equal_texts(batch: Batch, spec: PagedKV, device: torch.device) -> tuple[EqualTexts, ...] | None:
    """The texts of a step by length; None if a request is not whole, or its tokens see others in another way."""
    starts, lengths = batch.query_start_locs[:-1], np.diff(batch.query_start_locs)
    if not spec.is_bidirectional or spec.soft_cap or spec.slopes or spec.has_sinks or spec.latent_dim is not None:
        return None
    if not np.array_equal(lengths, batch.seq_lens):
        return None
    texts = []
    for length in np.unique(lengths).tolist():
        tokens = torch.from_numpy(starts[lengths == length][:, None] + np.arange(length))
        is_seen = None
        if spec.sliding_window is not None and spec.sliding_window < length:
            places = torch.arange(length)
            is_seen = ((places[:, None] - places).abs() < spec.sliding_window).to(device, non_blocking=True)
        texts.append(EqualTexts(tokens.to(device, non_blocking=True), is_seen))
    return tuple(texts)


def attend_to_texts(
    texts: tuple[EqualTexts, ...], queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: PagedKV
) -> torch.Tensor:
    """Shapes as in `AttentionStep.attend`."""
    if len(texts) == 1:  # all tokens, in their order
        shape = texts[0].tokens.shape
        heads = [part.view(*shape, *part.shape[1:]) for part in (queries, keys, values)]
        return _attend(heads, texts[0].is_seen, spec).flatten(0, 1)
    attended = queries.new_empty(*queries.shape[:2], values.shape[2])
    for each in texts:
        attended[each.tokens] = _attend([part[each.tokens] for part in (queries, keys, values)], each.is_seen, spec)
    return attended


def _attend(heads: list[torch.Tensor], is_seen: torch.Tensor | None, spec: PagedKV) -> torch.Tensor:
    """Queries, keys and values (num_texts, length, their heads, head_dim) -> as the queries."""
    queries, keys, values = (part.transpose(1, 2) for part in heads)
    has_groups = queries.shape[1] != keys.shape[1]
    attended = F.scaled_dot_product_attention(
        queries, keys, values, is_seen, scale=spec.score_scale, enable_gqa=has_groups
    )
    return attended.transpose(1, 2)
