"""Samples token ids from logits and reports log-probabilities.

Owns the order in which a row's parameters act. Promises that a row is sampled alone: its id and its log-probabilities
are the same, bit for bit, whatever other rows share the step. Draws no random numbers, since each row brings its own.
Never waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.engine.sampling import filters
from weft.engine.sampling.logits_processors import ApplyPenalties, apply_penalties, edit_logits
from weft.engine.sampling.logprobs import LogprobTensors, log_softmax, pick
from weft.engine.step.batch import Floats, Ints, SamplingBatch
from weft.engine.step.masks import RowMasks
from weft.engine.step.transfer import to_device


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What a step sampled, still on the device.

    Attributes:
        token_ids: (num_rows,) int64.
        logprobs: Of the rows that ask for them; None when none does.
    """

    token_ids: Tensor
    logprobs: LogprobTensors | None


PickIds = Callable[[Tensor, SamplingBatch, RowMasks | None], Tensor]
"""Steps 3 to 8 of `sample`: edited logits, which it may overwrite -> (num_rows,) int64 ids."""


def pick_ids(logits: Tensor, batch: SamplingBatch, masks: RowMasks | None) -> Tensor:
    """`PickIds` in plain torch, for any device: the reference for Weft's own samplers."""
    if masks is not None:
        masks.apply(logits)
    token_ids = logits.argmax(-1)  # the lowest id among equals
    if batch.temperatures.any():
        is_random = to_device(batch.temperatures, logits.device) > 0
        token_ids = torch.where(is_random, _draw(logits, batch, token_ids), token_ids)
    if masks is not None:
        masks.withdraw(token_ids, masks.are_empty(logits))
    return token_ids


@dataclass(frozen=True, slots=True)
class SamplingKit:
    """The steps of `sample` for which a device may have kernels of Weft's own."""

    apply_penalties: ApplyPenalties
    pick_ids: PickIds


TORCH_SAMPLING = SamplingKit(apply_penalties, pick_ids)
"""For any device."""


def sample(
    logits: Tensor,
    batch: SamplingBatch,
    previous_token_ids: Tensor | None,
    masks: RowMasks | None = None,
    kit: SamplingKit = TORCH_SAMPLING,
) -> SampleResult:
    """Pick one id for every row.

    1. Log-probabilities of the rows that ask, from the logits as the model gave them.
    2. Penalties, then bias, allowed ids and bans (`edit_logits`).
    3. Masks.
    4. Rows of temperature 0: the most probable id, the lowest of equals. Done.
    5. Temperature.
    6. min-p and top-k, each of the distribution after 5.
    7. top-p, of what 6 leaves.
    8. Inverse CDF in vocabulary order with the row's uniform number.

    Filters keep ids that tie with the last one they keep. When everything is banned the row yields the lowest id,
    or NO_TOKEN_ID where there is a mask.

    Args:
        logits: (num_rows, vocab_size) float32, contiguous; may be overwritten.
        previous_token_ids: (num_previous_rows,) int64, what the previous step sampled; None when nothing needs it.
        kit: Computes the penalties of step 2, and steps 3 to 8.
    """
    reporting = np.flatnonzero(batch.num_logprobs >= 0)
    all_logprobs = log_softmax(_rows(logits, reporting)) if len(reporting) else None
    edit_logits(logits, batch, previous_token_ids, kit.apply_penalties)
    token_ids = kit.pick_ids(logits, batch, masks)
    logprobs = None
    if all_logprobs is not None:
        reported_ids = _rows(token_ids, reporting).clamp(min=0)  # NO_TOKEN_ID ends the request anyway
        num_logprobs = batch.num_logprobs[reporting]
        logprobs = pick(all_logprobs, reported_ids, reporting, num_logprobs, batch.asked_logprobs)
    return SampleResult(token_ids, logprobs)


def _rows(values: Tensor, rows: Ints) -> Tensor:
    """Select rows, which ascend and are distinct. Returns values itself, not a copy, when that is all of them."""
    return values if len(rows) == len(values) else values.index_select(0, to_device(rows, values.device))


def _draw(logits: Tensor, batch: SamplingBatch, best: Tensor) -> Tensor:
    """Steps 5 to 8 for every row, also those of temperature 0. best: (num_rows,) ids of the largest logits."""

    def column(values: Floats) -> Tensor:
        return to_device(values, logits.device)[:, None]

    # The lower bound keeps rows where everything is banned from -inf - -inf = NaN.
    maxima = logits.gather(-1, best[:, None]).clamp(min=torch.finfo(torch.float32).min)  # (num_rows, 1)
    # Subtract the largest logit first, so that no temperature overflows.
    temperatures = column(np.where(batch.temperatures > 0, batch.temperatures, np.float32(1)))
    weights = logits.sub(maxima).div_(temperatures).exp_()
    weights.scatter_(-1, best[:, None], 1.0)  # already so, except where everything is banned
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
