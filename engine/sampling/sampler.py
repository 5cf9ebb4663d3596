"""Samples token ids from logits and reports log-probabilities.

Owns the order in which a row's parameters act. Promises that a row is sampled alone: its id and its log-probabilities
are the same, bit for bit, whatever other rows share the step. Draws no random numbers, since each row brings its own.
Never waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from weft.engine.sampling.logits_processors import ApplyPenalties, edit_logits
from weft.engine.sampling.logprobs import LogprobTensors, log_softmax, pick
from weft.engine.step.batch import Ints, SamplingBatch
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


@dataclass(frozen=True, slots=True)
class SamplingKit:
    """The steps of `sample` for which a device may have kernels of Weft's own."""

    apply_penalties: ApplyPenalties
    pick_ids: PickIds


def sample(
    logits: Tensor,
    batch: SamplingBatch,
    previous_token_ids: Tensor | None,
    masks: RowMasks | None = None,
    *,
    kit: SamplingKit,
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
