"""What a request's parameters do to its logits before anything is drawn.

Owns the order of the edits. They are sparse (row, id) writes: their cost grows with the ids that are named, never
with rows x vocabulary. -inf bans an id; no edit can turn it into NaN. Nothing here waits for the device.
"""

import torch
from torch import Tensor

from engine.batch import ConditionalBans, PenaltyBatch, Placeholders, SamplingBatch
from engine.sampling.transfer import to_device


def edit_logits(logits: Tensor, batch: SamplingBatch, previous_token_ids: Tensor | None) -> None:
    """Apply penalties, biases and bans to the logits, in place.

    1. Penalties (`apply_penalties`). They come first because repetition depends on the sign of the model's own
       logit, which a bias must not flip.
    2. Bias: added; -inf bans.
    3. Allowed ids: every other id of such a row becomes -inf. Bans among the allowed ids stay.
    4. Conditional bans.

    Args:
        logits: (num_rows, vocab_size) float32.
        previous_token_ids: (num_previous_rows,) int64, what the previous step sampled; None when nothing needs it.
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


def apply_penalties(logits: Tensor, penalties: PenaltyBatch, previous_token_ids: Tensor | None) -> None:
    """Apply the penalties to the logits, in place.

    1. Repetition, for each different id of prompt and output: a positive logit is divided, a negative one
       multiplied. Keskar et al., "CTRL", 2019, section 4.1.
    2. Presence, for each different id of the output: subtracted once.
    3. Frequency, for each id of the output: subtracted as often as it occurs.

    What the previous step sampled counts as output. An id may be named many times: "once" holds because every mention
    writes the same value.
    """
    device = logits.device
    rows = to_device(penalties.rows, device)
    output_entries = to_device(penalties.output_entries, device)
    output_ids = to_device(penalties.output_ids, device)
    if len(penalties.placeholders.targets):
        output_entries = torch.cat((output_entries, to_device(penalties.placeholders.targets, device)))
        output_ids = torch.cat((output_ids, _sampled_before(penalties.placeholders, previous_token_ids)))
    output_rows = rows[output_entries]

    if (penalties.repetition != 1).any():
        entries = torch.cat((to_device(penalties.prompt_entries, device), output_entries))
        ids = torch.cat((to_device(penalties.prompt_ids, device), output_ids))
        factors = to_device(penalties.repetition, device)[entries]
        values = logits[rows[entries], ids]
        logits[rows[entries], ids] = torch.where(values > 0, values / factors, values * factors)
    if penalties.presence.any():
        logits[output_rows, output_ids] = (
            logits[output_rows, output_ids] - to_device(penalties.presence, device)[output_entries]
        )
    if penalties.frequency.any():
        _add(logits, output_rows, output_ids, -to_device(penalties.frequency, device)[output_entries])


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
