"""Edits the logits before sampling: penalties, biases, allowed ids and bans that requests ask for.

A request owns its `TokenCounts` and `LogitEdits`; `edit_logits` applies those of all requests of a step and owns their
order. Edits are sparse (row, id) writes: their cost grows with the ids named, not with rows x vocabulary. -inf bans an
id; no edit can turn it into NaN. Nothing here waits for the device.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.engine.batch import ConditionalBans, Floats, Ints, PenaltyBatch, SamplingBatch
from weft.engine.device import to_device
from weft.engine.wire.params import SamplingParams

_NONE = np.zeros(0, np.int64)


class TokenCounts:
    """The distinct ids of prompt and output of a request, with their counts in the output, for penalties.

    The count is 0 for ids only in the prompt. Ids are in order of first occurrence. Arrays are 64-bit, so that a batch
    copies them as they are. O(1) for each output id.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        """Start with no output."""
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = array("q", self._places)
        self._counts = array("q", bytes(self._ids.itemsize * len(self._ids)))

    def add(self, token_id: int) -> None:
        """Count one more id of the output."""
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        self._counts[place] += 1

    def behind(self, draft_token_ids: tuple[int, ...]) -> tuple["array[int]", "array[int]"]:
        """Copies of ids and counts, as they will be if these drafts are accepted. O(distinct ids)."""
        ids, counts = self._ids[:], self._counts[:]
        for token_id, count in Counter(draft_token_ids).items():
            place = self._places.get(token_id)
            if place is None:
                ids.append(token_id)
                counts.append(count)
            else:
                counts[place] += count
        return ids, counts


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What a request asks for, as arrays made once and shared by its choices.

    A list may name the whole vocabulary. So a step only copies arrays, and never builds one from Python numbers.

    Attributes:
        bias_ids, bias_values: (b,) added in every row; -inf bans. Bad words of one id are among them.
        stop_ids, stop_bans: (s,) added until there are min_tokens output tokens.
        allowed_ids: (a,) ascending and unique; None allows all.
        words: Bad words of two ids or more.
        longest_word: Number of ids in the longest of them.
        ban_repeats: Whether `repeating_ids` may hold any.
        are_any: Whether anything is asked for, penalties included.
    """

    bias_ids: Ints
    bias_values: Floats
    stop_ids: Ints
    stop_bans: Floats
    allowed_ids: Ints | None
    words: tuple[tuple[int, ...], ...]
    longest_word: int
    ban_repeats: bool
    are_any: bool

    def leave_nothing(
        self, num_output_tokens: int, min_tokens: int, context: Sequence[int] = (), others: Collection[int] = ()
    ) -> bool:
        """Whether these edits, and bans of others, ban every id behind the context. Only possible with allowed ids."""
        if self.allowed_ids is None:
            return False
        banned = {int(i) for i in self.bias_ids[np.isneginf(self.bias_values)]}
        banned.update(others)
        banned.update(self.stop_ids.tolist() if num_output_tokens < min_tokens else ())
        tail = list(context)
        banned.update(word[-1] for word in self.words if tail[len(tail) - len(word) + 1 :] == list(word[:-1]))
        return len(self.allowed_ids) <= len(banned) and banned.issuperset(self.allowed_ids.tolist())


def repeating_ids(params: SamplingParams, own: list[int], given: list[int]) -> set[int]:
    """Ids that would end a run of ids that may not repeat, behind those of the output and what it begins with. O(ids).

    Args:
        given: Those of the encoder's input, or of the prompt without an encoder.
    """
    banned = set[int]()
    for size, text in ((params.no_repeat_ngram_size, own), (params.encoder_no_repeat_ngram_size, given)):
        if 0 < size <= len(own) + 1:
            banned |= continuations(text, own[len(own) - size + 1 :])
    return banned


def continuations(token_ids: list[int], head: list[int]) -> set[int]:
    """The ids that follow each occurrence of a few ids in others. O(ids)."""
    if not head:
        return set(token_ids)
    found, place, length = set[int](), -1, len(head)
    with suppress(ValueError):  # there is no further one
        while True:
            place = token_ids.index(head[0], place + 1, -length)
            if token_ids[place : place + length] == head:
                found.add(token_ids[place + length])
    return found


def make_edits(params: SamplingParams, stop_ids: Collection[int]) -> LogitEdits:
    """Make the arrays of a request; stop_ids are those of the caller and of the model."""
    single = [word[0] for word in params.bad_words_token_ids if len(word) == 1]
    words = tuple(word for word in params.bad_words_token_ids if len(word) > 1)
    allowed = params.allowed_token_ids
    ban_repeats = bool(params.no_repeat_ngram_size or params.encoder_no_repeat_ngram_size)
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1.0
    in_step = params.begin_bans, params.timestamps
    return LogitEdits(
        bias_ids=np.array([*params.logit_bias, *single], np.int64),
        bias_values=np.array([*params.logit_bias.values(), *[-np.inf] * len(single)], np.float32),
        stop_ids=np.array(sorted(stop_ids), np.int64),
        stop_bans=np.full(len(stop_ids), -np.inf, np.float32),
        allowed_ids=None if allowed is None else np.flatnonzero(np.bincount(np.array(allowed, np.int64))),
        words=words,
        longest_word=max(map(len, words), default=0),
        ban_repeats=ban_repeats,
        are_any=any((params.logit_bias, single, words, allowed, params.min_tokens, ban_repeats, *penalties, *in_step)),
    )


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
    reported: tuple[Ints, Tensor | None] = (_NONE, None),
) -> None:
    """Apply penalties, biases and bans to the logits, in place.

    1. Penalties (`apply_penalties`). They come first because repetition depends on the sign of the model's own
       logit, which a bias must not flip.
    2. Bias: added; -inf bans.
    3. Allowed ids: every other id of the row becomes -inf. Bans among the allowed ids stay.
    4. Conditional bans: -inf where the previous step sampled a certain id.
    5. Times, of what is left (`TimestampRule`).

    Args:
        logits: (num_rows, vocab_size) float32, contiguous.
        previous_token_ids: (num_previous_rows,) int64, ids that the previous step sampled; None if no row needs them.
        apply_penalties: Computes step 1.
        reported: The rows that report log-probabilities, ascending, and these, (n, vocab_size). Those of the batch's
            `edited_rows` take the place of their logits, and are edited; some then sum to 1 again.
    """
    rows, logprobs = reported
    if batch.edited_rows is not None and logprobs is not None:
        entries = to_device(np.searchsorted(rows, batch.edited_rows[:, 0]), logits.device)
        edited, renormalized = to_device(batch.edited_rows, logits.device).unbind(1)
        logits[edited] = logprobs[entries]
    if batch.penalties is not None:
        apply_penalties(logits, batch.penalties, previous_token_ids)
    if len(batch.bias_ids):
        _add(logits, batch.bias_rows, batch.bias_ids, to_device(batch.bias_values, logits.device))
    if len(batch.allowed_rows):
        _keep_only_allowed(logits, batch)
    if batch.conditional_bans is not None:
        _apply_conditional_bans(logits, batch.conditional_bans, previous_token_ids)
    if batch.times is not None:
        for row, *bounds in batch.times.tolist():
            _divide_by_times(logits[row], *bounds)
    if batch.edited_rows is not None and logprobs is not None:
        changed = logits[edited]
        logprobs[entries] = torch.where(renormalized[:, None] > 0, changed.log_softmax(-1), changed)


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


def _divide_by_times(row: Tensor, text: int, text_end: int, time: int, time_end: int) -> None:
    row[:text] = row[text_end:time] = row[time_end:] = float("-inf")
    if text_end:
        times = row[text_end:].float().logsumexp(0)
        row[:text_end].masked_fill_(times > row[:text_end].max(), float("-inf"))


def _add(logits: Tensor, rows: Ints, ids: Ints, values: Tensor) -> None:
    """Add to (row, id) in place; a pair that is named several times gets the sum."""
    places = to_device(rows, logits.device), to_device(ids, logits.device)
    logits.index_put_(places, values, accumulate=True)
