"""Applies penalties, biases, allowed ids and bans to the logits before sampling.

Owns the order of the edits. They are sparse (row, id) writes: their cost grows with the ids named, not with rows x
vocabulary. -inf bans an id; no edit can turn it into NaN. Nothing here waits for the device.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from weft.engine.step.batch import ConditionalBans, Ints, PenaltyBatch, SamplingBatch
from weft.engine.step.transfer import to_device

ApplyPenalties = Callable[[Tensor, PenaltyBatch, Tensor | None], None]
"""Step 1 of `edit_logits`, in place: logits, penalties, previous_token_ids as there."""


def apply_penalties(logits: Tensor, penalties: PenaltyBatch, previous_token_ids: Tensor | None) -> None:
    """`ApplyPenalties` in torch, for any device.

    1. Repetition, for each distinct id of prompt and output: a positive logit is divided, a negative one
       multiplied. Keskar et al., "CTRL", 2019, section 4.1.
    2. Presence, for each distinct id of the output: subtracted once.
    3. Frequency, for each distinct id of the output: subtracted times its count.

    Ids that the previous step sampled count as output.
    """
    device = logits.device
    entries = to_device(np.repeat(np.arange(len(penalties.rows)), np.diff(penalties.starts)), device)
    ids, counts = to_device(penalties.ids, device), to_device(penalties.counts, device)
    if len(penalties.placeholders.targets):
        entries, ids, counts = _with_placeholders(entries, ids, counts, penalties, previous_token_ids)
    rows, repetition, presence, frequency = (
        to_device(column, device).index_select(0, entries)
        for column in (penalties.rows, penalties.repetition, penalties.presence, penalties.frequency)
    )
    flat, places = logits.view(-1), rows * logits.size(1) + ids
    values = flat.index_select(0, places)
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[places] = values - presence * (counts > 0) - frequency * counts


def _with_placeholders(
    entries: Tensor, ids: Tensor, counts: Tensor, penalties: PenaltyBatch, previous_token_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Append the ids that the previous step sampled. An id listed already gets the same count in both places."""
    assert previous_token_ids is not None, "placeholders need the ids of the previous step"
    targets = to_device(penalties.placeholders.targets, ids.device)
    sampled_ids = previous_token_ids[to_device(penalties.placeholders.rows, ids.device)]
    is_sampled = ids == ids.new_full((len(penalties.rows),), -1).index_copy_(0, targets, sampled_ids)[entries]
    known_counts = counts.new_zeros(len(penalties.rows)).index_add_(0, entries, counts * is_sampled)[targets]
    return (
        torch.cat((entries, targets)),
        torch.cat((ids, sampled_ids)),
        torch.cat((counts + is_sampled, known_counts + 1)),
    )


def edit_logits(
    logits: Tensor,
    batch: SamplingBatch,
    previous_token_ids: Tensor | None,
    apply_penalties: ApplyPenalties = apply_penalties,
) -> None:
    """Apply penalties, biases and bans to the logits, in place.

    1. Penalties (`apply_penalties`). They come first because repetition depends on the sign of the model's own
       logit, which a bias must not flip.
    2. Bias: added; -inf bans.
    3. Allowed ids: every other id of the row becomes -inf. Bans among the allowed ids stay.
    4. Conditional bans: -inf where the previous step sampled a certain id.

    Args:
        logits: (num_rows, vocab_size) float32, contiguous.
        previous_token_ids: (num_previous_rows,) int64, ids that the previous step sampled; None if no row needs them.
        apply_penalties: Computes step 1.
    """
    if batch.penalties is not None:
        apply_penalties(logits, batch.penalties, previous_token_ids)
    if len(batch.bias_ids):
        _add(logits, batch.bias_rows, batch.bias_ids, to_device(batch.bias_values, logits.device))
    if len(batch.allowed_rows):
        _keep_only_allowed(logits, batch)
    if batch.conditional_bans is not None:
        _apply_conditional_bans(logits, batch.conditional_bans, previous_token_ids)


def _keep_only_allowed(logits: Tensor, batch: SamplingBatch) -> None:
    allowed_rows = to_device(batch.allowed_rows, logits.device)
    rows = allowed_rows[to_device(batch.allowed_entries, logits.device)]
    ids = to_device(batch.allowed_ids, logits.device)
    values = logits[rows, ids]
    logits.index_fill_(0, allowed_rows, float("-inf"))
    logits[rows, ids] = values


def _apply_conditional_bans(logits: Tensor, bans: ConditionalBans, previous_token_ids: Tensor | None) -> None:
    device = logits.device
    assert previous_token_ids is not None, "conditional bans need the ids of the previous step"
    is_met = previous_token_ids[to_device(bans.source_rows, device)] == to_device(bans.required_ids, device)
    values = torch.zeros(is_met.shape, device=device).masked_fill_(is_met, float("-inf"))
    _add(logits, bans.rows, bans.ids, values)


def _add(logits: Tensor, rows: Ints, ids: Ints, values: Tensor) -> None:
    """Add to (row, id) in place; a pair that is named several times gets the sum."""
    places = to_device(rows, logits.device), to_device(ids, logits.device)
    logits.index_put_(places, values, accumulate=True)
