"""Picks ids with torch's operations, on any device: temperature, filters and the draw, written plainly.

Weft's own samplers are compared with it.
"""

import numpy as np
import torch
from torch import Tensor

from weft.engine.kernels.torch import filters
from weft.engine.sampling.logits_processors import apply_penalties
from weft.engine.sampling.sampler import SamplingKit
from weft.engine.step.batch import Floats, SamplingBatch
from weft.engine.step.masks import RowMasks
from weft.engine.step.transfer import to_device


def pick_ids(logits: Tensor, batch: SamplingBatch, masks: RowMasks | None) -> Tensor:
    """A `PickIds` for any device."""
    if masks is not None:
        masks.apply(logits)
    token_ids = logits.argmax(-1)  # the lowest id among equals
    if batch.temperatures.any():
        is_random = to_device(batch.temperatures, logits.device) > 0
        token_ids = torch.where(is_random, _draw(logits, batch, token_ids), token_ids)
    if masks is not None:
        masks.withdraw(token_ids, masks.are_empty(logits))
    return token_ids


TORCH_SAMPLING = SamplingKit(apply_penalties, pick_ids)
"""For any device."""


def _draw(logits: Tensor, batch: SamplingBatch, best: Tensor) -> Tensor:
    """Steps 5 to 8 for every row, those of temperature 0 as well; best: (num_rows,) ids of the largest logits."""

    def column(values: Floats) -> Tensor:
        return to_device(values, logits.device)[:, None]

    # The lower bound keeps rows where everything is banned from -inf - -inf = NaN.
    maxima = logits.gather(-1, best[:, None]).clamp(min=torch.finfo(torch.float32).min)  # (num_rows, 1)
    # Relative to the largest logit first, so that no temperature overflows.
    temperatures = column(np.where(batch.temperatures > 0, batch.temperatures, np.float32(1)))
    weights = logits.sub(maxima).div_(temperatures).exp_()
    weights.scatter_(-1, best[:, None], 1.0)  # true already, but where everything is banned
    if batch.top_ks.any() or batch.min_ps.any() or (batch.top_ps < 1).any():
        weights.mul_(weights >= filters.weight_floors(weights, batch.top_ks, batch.top_ps, batch.min_ps))
    return draw(weights, column(batch.uniforms))


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first id in vocabulary order whose cumulated weight exceeds uniform * total, so never one of weight 0.

    Args:
        weights: (num_rows, vocab_size) float32 >= 0, not normalised, with a positive total.
        uniforms: (num_rows, 1) float32 in [0, 1).

    Returns:
        (num_rows,) int64; ids are in range even when a row is full of NaN.
    """
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    ids = torch.searchsorted(cumulated, uniforms.to(torch.float64) * cumulated[:, -1:], right=True)
    return ids[:, 0].clamp(max=weights.shape[-1] - 1)
