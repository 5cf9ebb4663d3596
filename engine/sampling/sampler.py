"""Logits to ids.

Owns the order in which a row's parameters act and the promise that a row is sampled alone: its id and its
log-probabilities are the same, bit for bit, whatever other rows share the step. Draws no random numbers (each row
brings its own) and never waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.engine.sampling import chunks, filters
from weft.engine.sampling.logits_processors import ApplyPenalties, apply_penalties, edit_logits
from weft.engine.sampling.logprobs import LogprobTensors, log_softmax, pick
from weft.engine.step.batch import Floats, Ints, SamplingBatch
from weft.engine.step.masks import RowMasks
from weft.engine.step.transfer import to_device

_LOWEST = -87.0
_UNDERFLOW = 2e-38
"""Above exp(_LOWEST): a weight that is relatively so small counts as none."""


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
    """`PickIds` by torch, for any device. Rows are split by what they need: none pays for another's parameters."""
    if masks is not None:
        masks.apply(logits)
    is_empty = masks.are_empty(logits) if masks is not None and _has_bans(batch) else None
    token_ids = _pick_allowed(logits, batch, masks is not None)
    if masks is not None and is_empty is not None:
        masks.withdraw(token_ids, is_empty)
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
    7. top-p, of what 6 left.
    8. Inverse CDF in vocabulary order with the row's uniform number.

    Filters keep ids that tie with the last one they keep. When everything is banned the row yields the lowest id,
    or NO_TOKEN_ID where there is a mask.

    Args:
        logits: (num_rows, vocab_size) float32, contiguous; overwritten.
        previous_token_ids: (num_previous_rows,) int64, what the previous step sampled; None when nothing needs it.
        kit: Computes the penalties of step 2, and steps 3 to 8.
    """
    reporting = np.flatnonzero(batch.num_logprobs >= 0)
    all_logprobs = log_softmax(filters.select_rows(logits, reporting)) if len(reporting) else None
    edit_logits(logits, batch, previous_token_ids, kit.apply_penalties)
    token_ids = kit.pick_ids(logits, batch, masks)
    logprobs = None
    if all_logprobs is not None:
        reported_ids = filters.select_rows(token_ids, reporting).clamp(min=0)  # NO_TOKEN_ID ends the request anyway
        num_logprobs = batch.num_logprobs[reporting]
        logprobs = pick(all_logprobs, reported_ids, reporting, num_logprobs, batch.asked_logprobs)
    return SampleResult(token_ids, logprobs)


def _has_bans(batch: SamplingBatch) -> bool:
    """Whether anything but a mask bans ids; by itself a mask always leaves some."""
    return bool(len(batch.bias_ids) or len(batch.allowed_rows)) or batch.conditional_bans is not None


def _pick_allowed(logits: Tensor, batch: SamplingBatch, is_masked: bool) -> Tensor:
    is_random = batch.temperatures > 0
    is_filtered = is_random & (
        ((batch.top_ks > 0) & (batch.top_ks < logits.shape[-1])) | (batch.top_ps < 1) | (batch.min_ps > 0)
    )
    greedy, plain, filtered = map(np.flatnonzero, (~is_random, is_random & ~is_filtered, is_filtered))
    groups: list[tuple[Ints, Tensor]] = []
    if len(greedy):
        groups.append((greedy, chunks.argmax(filters.select_rows(logits, greedy))))
    for rows in (plain, filtered):
        if len(rows):
            groups.append((rows, _draw(filters.select_rows(logits, rows), batch, rows, is_masked)))
    if len(groups) == 1:
        return groups[0][1]
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for rows, ids in groups:
        token_ids.index_copy_(0, to_device(rows, logits.device), ids)
    return token_ids


def _draw(logits: Tensor, batch: SamplingBatch, rows: Ints, is_masked: bool) -> Tensor:
    """Steps 5 to 8 for the given rows of the batch; logits are theirs alone and are overwritten."""

    def column(values: Floats) -> Tensor:
        return to_device(values[rows], logits.device)[:, None]

    best = chunks.argmax(logits)[:, None]
    # The lower bound keeps rows where everything is banned from -inf - -inf = NaN.
    maxima = logits.gather(-1, best).clamp(min=torch.finfo(torch.float32).min)  # (num_rows, 1)
    top_ks, top_ps, min_ps = batch.top_ks[rows], batch.top_ps[rows], batch.min_ps[rows]
    kept = None
    if top_ks.any() or min_ps.any():
        floors = filters.logit_floors(logits, maxima, batch.temperatures[rows], top_ks, min_ps)
        kept = filters.at_least(logits, floors)
    # Relative to the largest logit first, so that no temperature overflows; in place, for the sake of the CPU.
    weights = logits.sub_(maxima).div_(column(batch.temperatures))
    if is_masked:  # exp of -inf is many times slower than of a number
        weights.clamp_(min=_LOWEST)
    weights.exp_()
    if is_masked:
        torch.threshold_(weights, _UNDERFLOW, 0.0)
    if kept is not None:
        weights.mul_(kept)
    weights.scatter_(-1, best, 1.0)  # true already, but where everything is banned
    if (top_ps < 1).any():
        weights.mul_(filters.at_least(weights, filters.nucleus_floors(weights, top_ps)))
    return chunks.draw(weights, column(batch.uniforms)[:, 0])
