"""What some requests add to a step, such as those of poolers and with pictures, and what poolers get of it."""

import logging
from collections.abc import Iterator
from itertools import chain, islice

import numpy as np

from weft.engine.batch import Floats, Ints
from weft.engine.batch_inputs import InputBatch, PictureTokens, PoolBatch
from weft.engine.request import Request
from weft.engine.sampling.pooling import Pooler
from weft.engine.schedule.scheduler import ScheduledRequest, Scheduler
from weft.engine.wire.inputs import TokenSpan
from weft.engine.wire.messages import FinishReason, RequestOutput, TokensOutput
from weft.engine.wire.params import PooledOutput

logger = logging.getLogger(__name__)

FAR = 1 << 30
"""More tokens than any request has."""


def input_batch(requests: list[ScheduledRequest]) -> InputBatch:
    """The inputs that requests begin with; sounds of those that begin in this step."""
    return InputBatch(
        np.array([s.request.input_length for s in requests]),
        np.array([s.request.num_input_slots for s in requests]),
        tuple(np.frombuffer(s.request.samples, np.int16) for s in requests if s.request.samples and not s.start),
    )


def token_types(requests: list[ScheduledRequest]) -> Ints | None:
    """Those of all tokens; requests of encoders are computed whole."""
    if not any(s.request.token_types for s in requests):
        return None
    types = (s.request.token_types or [0] * s.num_tokens for s in requests)
    return np.fromiter(chain.from_iterable(types), np.int64)


def next_ids(requests: list[ScheduledRequest]) -> Ints | None:
    """`Batch.next_ids`, for heads that draft."""
    ends = ((s.request.token_ids, s.start + s.num_tokens) for s in requests if not s.num_rows)
    found = [next(iter(token_ids[end : end + 1]), 0) for token_ids, end in ends]
    return np.array(found, np.int64) if found else None


def picture_tokens(requests: list[ScheduledRequest], query_start_locs: Ints) -> tuple[PictureTokens, ...]:
    """The pictures, whole or in part, whose tokens a step computes; where layers attend to them, all that are seen."""
    seeing = [(i, scheduled) for i, scheduled in enumerate(requests) if scheduled.request.pictures]
    found = list[PictureTokens]()
    for i, scheduled in seeing:
        request, offset, start = scheduled.request, int(query_start_locs[i]), scheduled.start
        end = start + scheduled.num_tokens
        if request.pictures[0].is_attended:
            found += _seen_pictures(scheduled, offset)
            continue
        if start >= request.spans[-1].start + request.spans[-1].num_tokens:
            continue  # as all that decode
        for span, picture in zip(request.spans, request.pictures, strict=True):
            if span.start < end and start < span.start + span.num_tokens:
                ids = np.array(request.token_ids[span.start : span.start + span.num_tokens])
                places = span.start + np.flatnonzero(ids == picture.token_id)
                first, last = np.searchsorted(places, (start, end))
                key = picture_key(request, span, len(places))
                found.append(PictureTokens(key, places[first:last] - start + offset, int(first)))
    return tuple(found)


def picture_key(request: Request, span: TokenSpan, num_features: int) -> bytes:
    """Equal for the features of equal pictures, but not for requests that share no prefix."""
    return request.cache_seed + span.digest + num_features.to_bytes(8, "little")


def _seen_pictures(scheduled: ScheduledRequest, offset: int) -> Iterator[PictureTokens]:
    """The pictures that tokens of a step see, where layers attend to them."""
    request, start = scheduled.request, scheduled.start
    for view, span in zip(views(request), request.spans, strict=True):
        seeing = np.arange(max(view.start, start), min(view.stop, start + scheduled.num_tokens))
        if len(seeing):
            yield PictureTokens(picture_key(request, span, 1), seeing - start + offset, 0)


def views(request: Request) -> list[range]:
    """For each picture that layers attend to, the positions of the tokens that see it.

    A token sees the last picture up to itself, and those right before that. So pictures in a row are all seen up to the
    next one behind some text. See `get_cross_attention_token_mask` of transformers.
    """
    found = list[range]()
    end = following = FAR
    for span in reversed(request.spans):
        if span.start + span.num_tokens < following:
            end = following
        following = span.start
        found.append(range(span.start, end))
    return found[::-1]


def table_rows(requests: list[ScheduledRequest], positions: Ints, query_start_locs: Ints) -> Ints | None:
    """`Batch.table_rows`."""
    offsets = np.fromiter((s.request.table_offset for s in requests), np.int64, len(requests))
    on_axes = [(i, s) for i, s in enumerate(requests) if s.request.pictures and _is_on_axes(s)]
    if not on_axes and not offsets.any():
        return None
    rows = positions + np.repeat(offsets, np.diff(query_start_locs))
    if on_axes:
        rows = np.tile(rows, (3, 1))
    for i, scheduled in on_axes:
        rows[:, query_start_locs[i] : query_start_locs[i + 1]] = _axis_positions(scheduled)
    return rows if rows.ndim == 1 or (rows != rows[0]).any() else rows[0]


def _is_on_axes(scheduled: ScheduledRequest) -> bool:
    """Whether a step computes tokens that are in pictures with rows and columns, or before one of them."""
    last = scheduled.request.spans[-1]
    return scheduled.start < last.start + last.num_tokens and any(each.grid for each in scheduled.request.pictures)


def _axis_positions(scheduled: ScheduledRequest) -> Ints:
    """(3, num_tokens): time, row and column of each token, which are all the same in text.

    Those of a picture count from its start; text behind it goes on behind the largest of them.
    """
    places, request, offset = np.arange(scheduled.start, scheduled.start + scheduled.num_tokens), scheduled.request, 0
    found = np.tile(places, (3, 1))
    for span, picture in zip(request.spans, request.pictures, strict=True):
        if picture.grid is None:
            continue
        first, last = np.searchsorted(places, (span.start, span.start + span.num_tokens))
        found[:, first:last] = span.start + offset
        found[1:, first:last] += np.unravel_index(places[first:last] - span.start, picture.grid)
        found[:, last:] += picture.position_offset
        offset += picture.position_offset
    return found


def time_bounds(rows: list[tuple[ScheduledRequest, int]]) -> Ints | None:
    """`SamplingBatch.times` of rows, each with how many drafts are before it; None where no output is divided."""
    times = [
        (row, *rule.bounds([*s.request.token_ids[s.request.num_prompt_tokens :], *s.draft_token_ids[:offset]]))
        for row, (s, offset) in enumerate(rows)
        if (rule := s.request.params.timestamps)
    ]
    return np.array(times) if times else None


def pool_batch(requests: list[ScheduledRequest], query_start_locs: Ints) -> PoolBatch | None:
    """The tokens of a step whose hidden states are wanted; None when nobody wants any."""
    indices: list[Ints] = []
    lengths: list[int] = []
    for scheduled, offset in zip(requests, query_start_locs[:-1].tolist(), strict=True):
        if scheduled.request.pooler is not None:
            wanted = scheduled.request.pooler.wanted(scheduled.start, scheduled.num_tokens)
            shift = offset - scheduled.start
            indices.append(np.arange(wanted.positions.start + shift, wanted.positions.stop + shift))
            lengths += wanted.lengths
    return PoolBatch(np.concatenate(indices), np.array(lengths, np.int64)) if lengths else None


def give(
    scheduler: Scheduler, scheduled: ScheduledRequest, pooler: Pooler, pooled: Iterator[Floats]
) -> list[tuple[int, RequestOutput]]:
    """Give a request its part of the hidden states; its vector once it has all of them."""
    request, key = scheduled.request, scheduled.request.key
    wanted = pooler.wanted(scheduled.start, scheduled.num_tokens)
    rows = list(islice(pooled, len(wanted.lengths)))
    if request.is_finished:
        return []
    pooler.take(wanted, rows)
    if not pooler.is_complete:
        return []
    try:
        values = pooler.vector()
    except Exception as error:
        logger.exception("request %s failed, and the others go on", request.key)
        scheduler.drop(request)
        message = f"the request failed: {type(error).__name__}"
        return [(key.connection, TokensOutput(key.request_id, 0, [], FinishReason.ERROR, message=message))]
    scheduler.drop(request)
    content = values.astype("<f4", copy=False).tobytes()
    times = request.num_cached_tokens, request.queue_time_s
    return [(key.connection, PooledOutput(key.request_id, key.choice, content, len(values), FinishReason.STOP, *times))]
