"""Flattens a scheduled step into the arrays of a `Batch`.

Reads requests and never changes them. Must run right after `Scheduler.schedule`, before any step is collected: ids that
are not yet on the host are placeholders here.
"""

from array import array
from collections.abc import Sequence
from itertools import chain

import numpy as np

from weft.engine import batch
from weft.engine.batch import Floats, Ints
from weft.engine.cache.specs import CacheSpec, StateSpec
from weft.engine.guidance.matcher import ReasoningProgress
from weft.engine.request import Request, RequestKey
from weft.engine.sampling.sampler import uniforms
from weft.engine.schedule import pooled_requests
from weft.engine.schedule.scheduler import ScheduledRequest, ScheduledStep

_NO_IDS, _NO_VALUES = np.zeros(0, np.int64), np.zeros(0, np.float32)


def build_batch(
    step: ScheduledStep, previous: ScheduledStep | None, block_size: int, specs: Sequence[CacheSpec]
) -> batch.Batch:
    """Flatten a step.

    Args:
        previous: The step that is launched and not collected yet; None if there is none. Placeholders refer to its
            rows.
        specs: One entry per cache group.
    """
    requests = step.requests
    source_rows = {s.request.key: s.first_row for s in previous.requests if s.num_rows} if previous else {}
    lengths = np.fromiter((s.num_tokens for s in requests), np.int64, len(requests))
    starts = np.fromiter((s.start for s in requests), np.int64, len(requests))
    query_start_locs = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.arange(query_start_locs[-1]) + np.repeat(starts - query_start_locs[:-1], lengths)
    return batch.Batch(
        token_ids=_ints(chain.from_iterable(map(_input_ids, requests))),
        positions=positions,
        placeholders=_input_placeholders(requests, query_start_locs, source_rows),
        query_start_locs=query_start_locs,
        seq_lens=starts + lengths,
        groups=tuple(_group(step, group, spec, positions, lengths, block_size) for group, spec in enumerate(specs)),
        row_indices=_row_indices(requests, query_start_locs),
        sampling=_sampling(requests, source_rows),
        scores=_scores(requests, query_start_locs),
        token_types=pooled_requests.token_types(requests) if any(spec.is_bidirectional for spec in specs) else None,
        pooling=pooled_requests.pool_batch(requests, query_start_locs),
        pictures=pooled_requests.picture_tokens(requests, query_start_locs),
        inputs=pooled_requests.input_batch(requests) if any(spec.num_input_tokens for spec in specs) else None,
        table_rows=pooled_requests.table_rows(requests, positions, query_start_locs),
        adapters=_ints(slots) if any(slots := [s.request.adapter_slot for s in requests]) else None,
        next_ids=pooled_requests.next_ids(requests),
    )


def scored_range(scheduled: ScheduledRequest) -> range:
    """Positions of the prompt tokens that this step scores: those after computed positions, each scored once."""
    request = scheduled.request
    if request.params.prompt_logprobs is None:
        return range(0)
    end = min(scheduled.start + scheduled.num_tokens, request.num_prompt_tokens - 1)
    return range(max(scheduled.start, request.num_scored_tokens - 1) + 1, end + 1)


def _ints(values: Sequence[int] | chain[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _repeat(values: Sequence[int], parts: Sequence[Ints]) -> Ints:
    """Repeat each value once per element of its part."""
    return np.repeat(_ints(values), _ints([len(part) for part in parts]))


def _input_ids(scheduled: ScheduledRequest) -> list[int]:
    """Input ids of one request: known tokens, 0 for a placeholder, drafts."""
    num_known = scheduled.num_context_tokens - scheduled.num_placeholders
    end = scheduled.start + scheduled.num_tokens
    ids = scheduled.request.token_ids[scheduled.start : min(end, num_known)]
    if end > num_known:
        ids += [0] * scheduled.num_placeholders + list(scheduled.draft_token_ids)
    return ids


def _input_placeholders(
    requests: list[ScheduledRequest], query_start_locs: Ints, source_rows: dict[RequestKey, int]
) -> batch.Placeholders:
    targets, rows = [], []
    for scheduled, end in zip(requests, query_start_locs[1:].tolist(), strict=True):
        if scheduled.num_placeholders:
            targets.append(end - 1)
            rows.append(source_rows[scheduled.request.key])
    return batch.Placeholders(_ints(targets), _ints(rows))


def _group(
    step: ScheduledStep, group: int, spec: CacheSpec, positions: Ints, lengths: Ints, block_size: int
) -> batch.GroupBatch:
    tables = [s.request.block_tables[group] for s in step.requests]
    block_tables = np.zeros((len(tables), max(map(len, tables))), np.int64)
    for row, table in enumerate(tables):
        block_tables[row, : len(table)] = table
    pairs = [(source, target) for target, source in step.blocks.copies[group].items()]
    copies = np.array(pairs, np.int64).reshape(-1, 2)
    if isinstance(spec, StateSpec):
        return batch.GroupBatch(_NO_IDS, block_tables, copies)
    rows = np.repeat(np.arange(len(tables)), lengths)
    blocks, offsets = np.divmod(positions, block_size)
    return batch.GroupBatch(block_tables[rows, blocks] * block_size + offsets, block_tables, copies)


def _row_indices(requests: list[ScheduledRequest], query_start_locs: Ints) -> Ints:
    """A request's rows are its last tokens."""
    ends = query_start_locs[1:].tolist()
    return _ints(chain.from_iterable(range(end - s.num_rows, end) for s, end in zip(requests, ends, strict=True)))


def _scores(requests: list[ScheduledRequest], query_start_locs: Ints) -> batch.ScoreBatch | None:
    indices: list[int] = []
    targets: list[int] = []
    num_logprobs: list[int] = []
    for scheduled, offset in zip(requests, query_start_locs[:-1].tolist(), strict=True):
        positions = scored_range(scheduled)
        indices += [offset + position - 1 - scheduled.start for position in positions]
        targets += scheduled.request.prompt_token_ids[positions.start : positions.stop] if positions else []
        num_logprobs += [scheduled.request.params.prompt_logprobs or 0] * len(positions)
    return batch.ScoreBatch(_ints(indices), _ints(targets), _ints(num_logprobs)) if indices else None


# --- sampling -----------------------------------------------------------------------------------------------------


def _sampling(requests: list[ScheduledRequest], source_rows: dict[RequestKey, int]) -> batch.SamplingBatch:
    rows = [(s, offset) for s in requests for offset in range(s.num_rows)]
    params = [s.request.params for s, _ in rows]
    edits = _Edits()
    penalties = _Penalties()
    for row, (scheduled, offset) in enumerate(rows):
        source_row = source_rows[scheduled.request.key] if scheduled.num_placeholders else None
        edits.add(row, scheduled, offset, source_row)
        penalties.add(row, scheduled, offset, source_row)
    bias_rows, bias_ids, bias_values = edits.bias()
    allowed_rows, allowed_entries, allowed_ids = edits.allowed()
    searched = [(row, s.request) for row, (s, _) in enumerate(rows) if s.request.continuation]
    edited = [(row, request.params.renormalizes) for row, request in searched if request.edits.are_any]
    return batch.SamplingBatch(
        temperatures=np.array([p.temperature for p in params], np.float32),
        top_ks=_ints([p.top_k for p in params]),
        top_ps=np.array([p.top_p for p in params], np.float32),
        min_ps=np.array([p.min_p for p in params], np.float32),
        uniforms=_uniforms(rows),
        num_logprobs=_ints([-1 if p.logprobs is None else p.logprobs for p in params]),
        bias_rows=bias_rows,
        bias_ids=bias_ids,
        bias_values=bias_values,
        allowed_rows=allowed_rows,
        allowed_entries=allowed_entries,
        allowed_ids=allowed_ids,
        penalties=penalties.build(),
        conditional_bans=edits.conditional_bans(),
        asked_logprobs=_asked_logprobs(rows),
        times=pooled_requests.time_bounds(rows),
        edited_rows=np.array(edited, np.int64) if edited else None,
    )


def _asked_logprobs(rows: list[tuple[ScheduledRequest, int]]) -> batch.AskedLogprobs | None:
    asked = [(row, i) for row, (s, _) in enumerate(rows) for i in s.request.params.logprob_token_ids]
    return batch.AskedLogprobs(_ints([row for row, _ in asked]), _ints([i for _, i in asked])) if asked else None


def _uniforms(rows: list[tuple[ScheduledRequest, int]]) -> Floats:
    if not any(s.request.params.temperature for s, _ in rows):
        return np.zeros(len(rows), np.float32)  # nobody draws
    seeds = np.array([s.request.params.seed for s, _ in rows], np.uint64)
    positions = _ints([s.num_context_tokens + offset for s, offset in rows])
    return uniforms(seeds, positions, _ints([s.request.key.choice for s, _ in rows]))


def _must_end(reasoning: ReasoningProgress, request: Request, draft_token_ids: tuple[int, ...]) -> bool:
    """Whether reasoning must end after these drafts. Not if the grammar forbids the end here, as within a character."""
    if not reasoning.is_used_up(draft_token_ids):
        return False
    return request.grammar is None or request.grammar.allows(draft_token_ids, reasoning.budget.end_token_id)


class _Edits:
    """Gathers bias, bans and allowed ids of all rows."""

    def __init__(self) -> None:
        self._bias: list[tuple[int, Ints, Floats]] = []
        self._bans: list[tuple[int, int]] = []
        self._allowed: list[tuple[int, Ints]] = []
        self._conditional: list[tuple[int, int, int, int]] = []

    def add(self, row: int, scheduled: ScheduledRequest, offset: int, source_row: int | None) -> None:
        """Add a row. source_row is the previous step's row that samples its last input id; None if the id is known."""
        request = scheduled.request
        edits = request.edits
        drafts = scheduled.draft_token_ids[:offset]
        if request.reasoning is not None and _must_end(request.reasoning, request, drafts):
            self._allowed.append((row, np.array([request.reasoning.budget.end_token_id], np.int64)))
            return
        if len(edits.bias_ids):
            self._bias.append((row, edits.bias_ids, edits.bias_values))
        if scheduled.num_context_tokens + offset - request.num_prompt_tokens < request.params.min_tokens:
            self._bias.append((row, edits.stop_ids, edits.stop_bans))
        if edits.allowed_ids is not None:
            self._allowed.append((row, edits.allowed_ids))
        if edits.words:
            context = request.last_ids(edits.longest_word) + list(drafts)
            for word in edits.words:
                self._ban_end(row, word, context, source_row)
        if edits.ban_repeats:
            self._bans += [(row, token_id) for token_id in request.repeating_ids(drafts)]
        if request.params.begin_bans and scheduled.num_context_tokens + offset == request.num_prompt_tokens:
            self._bans += [(row, token_id) for token_id in request.params.begin_bans]

    def bias(self) -> tuple[Ints, Ints, Floats]:
        """Rows, ids and values of the sparse addition."""
        if not self._bias and not self._bans:
            return _NO_IDS, _NO_IDS, _NO_VALUES
        banned = np.array(self._bans, np.int64).reshape(-1, 2)
        rows = _repeat([row for row, _, _ in self._bias], [ids for _, ids, _ in self._bias])
        return (
            np.concatenate((rows, banned[:, 0])),
            np.concatenate([*(ids for _, ids, _ in self._bias), banned[:, 1]]),
            np.concatenate([*(values for _, _, values in self._bias), np.full(len(banned), -np.inf, np.float32)]),
        )

    def allowed(self) -> tuple[Ints, Ints, Ints]:
        """Rows where only some ids are allowed, and those ids, each with the index of its row here."""
        if not self._allowed:
            return _NO_IDS, _NO_IDS, _NO_IDS
        ids = [ids for _, ids in self._allowed]
        rows = _ints([row for row, _ in self._allowed])
        return rows, _repeat(range(len(ids)), ids), np.concatenate(ids)

    def conditional_bans(self) -> batch.ConditionalBans | None:
        """Bans that depend on ids still on the device."""
        if not self._conditional:
            return None
        rows, ids, source_rows, required_ids = np.array(self._conditional, np.int64).T
        return batch.ConditionalBans(rows=rows, ids=ids, source_rows=source_rows, required_ids=required_ids)

    def _ban_end(self, row: int, word: tuple[int, ...], context: list[int], source_row: int | None) -> None:
        """Ban the last id of a word if the context ends with the ids before it."""
        *head, last = word
        if source_row is None:
            if head[-1] == context[-1] and head == context[len(context) - len(head) :]:
                self._bans.append((row, last))
        elif head[:-1] == context[len(context) - len(head) + 1 :]:
            self._conditional.append((row, last, source_row, head[-1]))


class _Penalties:
    """Gathers the rows that ask for a penalty."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, float, float, float]] = []
        self._ids: list[array[int]] = []
        self._counts: list[array[int]] = []
        self._placeholders: list[tuple[int, int]] = []

    def add(self, row: int, scheduled: ScheduledRequest, offset: int, source_row: int | None) -> None:
        """Add a row."""
        request = scheduled.request
        params = request.params
        if request.token_counts is None:
            return
        if source_row is not None:
            self._placeholders.append((len(self._rows), source_row))
        self._rows.append((row, params.presence_penalty, params.frequency_penalty, params.repetition_penalty))
        ids, counts = request.token_counts.behind(scheduled.draft_token_ids[:offset])
        self._ids.append(ids)
        self._counts.append(counts)

    def build(self) -> batch.PenaltyBatch | None:
        """Return the flat arrays; None when no row asks for a penalty."""
        if not self._rows:
            return None
        rows, presence, frequency, repetition = zip(*self._rows, strict=True)
        targets, sources = zip(*self._placeholders, strict=True) if self._placeholders else ((), ())
        return batch.PenaltyBatch(
            rows=_ints(rows),
            presence=np.array(presence, np.float32),
            frequency=np.array(frequency, np.float32),
            repetition=np.array(repetition, np.float32),
            starts=np.cumsum([0, *map(len, self._ids)]),
            ids=np.concatenate(self._ids, dtype=np.int64),
            counts=np.concatenate(self._counts, dtype=np.int64),
            placeholders=batch.Placeholders(_ints(targets), _ints(sources)),
        )
