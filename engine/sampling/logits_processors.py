"""What a request's parameters do to its logits before anything is drawn.

Owns the order of the edits. They are sparse (row, id) writes: their cost grows with the ids that are named, never
with rows x vocabulary. -inf bans an id; no edit can turn it into NaN. Nothing here waits for the device.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from weft.engine.step.batch import ConditionalBans, PenaltyBatch, Placeholders, SamplingBatch
from weft.engine.step.transfer import to_device

ApplyPenalties = Callable[[Tensor, PenaltyBatch, Tensor | None], None]
"""Step 1 of `edit_logits`, in place; its arguments are those of `edit_logits`."""


def apply_penalties(logits: Tensor, penalties: PenaltyBatch, previous_token_ids: Tensor | None) -> None:
    """`ApplyPenalties` by torch, for any device.

    1. Repetition, for each different id of prompt and output: a positive logit is divided, a negative one
       multiplied. Keskar et al., "CTRL", 2019, section 4.1.
    2. Presence, for each different id of the output: subtracted once.
    3. Frequency, for each id of the output: subtracted times its count.

    What the previous step sampled counts as output.
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
    """Append what the previous step sampled. An id that the entry has already gets the same count in both places."""
    placeholders = penalties.placeholders
    targets = to_device(placeholders.targets, ids.device)
    sampled_ids = _sampled_before(placeholders, previous_token_ids)
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
    3. Allowed ids: every other id of such a row becomes -inf. Bans among the allowed ids stay.
    4. Conditional bans.

    Args:
        logits: (num_rows, vocab_size) float32, contiguous.
        previous_token_ids: (num_previous_rows,) int64, what the previous step sampled; None when nothing needs it.
        apply_penalties: Computes step 1.
    """
    if batch.penalties is not None:
        apply_penalties(logits, batch.penalties, previous_token_ids)
    if len(batch.bias_ids):
        _add(
            logits,
            to_device(batch.bias_rows, logits.device),
            to_device(batch.bias_ids, logits.device),
            to_device(batch.bias_values, logits.device),
        )
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
    _add(logits, to_device(bans.rows, device), to_device(bans.ids, device), values)


def _sampled_before(placeholders: Placeholders, previous_token_ids: Tensor | None) -> Tensor:
    assert previous_token_ids is not None, "placeholders need the ids of the previous step"
    return previous_token_ids[to_device(placeholders.rows, previous_token_ids.device)]


def _add(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add to (row, id) in place; an id that is named several times gets the sum."""
    logits.index_put_((rows, ids), values, accumulate=True)
