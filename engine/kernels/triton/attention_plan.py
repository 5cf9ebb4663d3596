"""What the programs of `attend_kernel` and `merge_kernel` do in a step: a list of items, made on the host with numpy.

An item is one tile of queries of one request and one range of its keys. A request with a long context and few queries
is split into several items, so that few requests keep a whole GPU busy and a long one does not outlast the others; how
many parts it takes is decided by the load of the step. The *number* of items, and of merges of a decode step, is a
function of the numbers of requests and tokens alone, because a captured graph cannot change its grid: what is left over
stays empty and ends at once. Imports neither torch nor triton.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.engine.step.batch import Batch, Ints

Bools = npt.NDArray[np.bool_]

NUM_ITEM_FIELDS = 7
"""Request (where its block table starts, once the backend knows), first token of the step, number of tokens, position
of the first one, first key, behind the last key, and the row in the workspace that a part's result goes to, or -1."""

NUM_MERGE_FIELDS = 4
"""Token of the step, row of its first part in the workspace, number of parts, rows from one part to the next."""

_MIN_PART_KEYS = 128
"""A part of fewer keys costs more in merging than it gains."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """How far contexts are split.

    Attributes:
        num_parts: Parts that a step aims at, per K/V head.
        max_rows: Rows of the workspace, one for each part of each token: at least num_parts + the most requests.
    """

    num_parts: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class Work:
    """Items (num_items, NUM_ITEM_FIELDS) and merges (num_merges, NUM_MERGE_FIELDS) of a step for one KV group."""

    items: Ints
    merges: Ints


def is_decode(batch: Batch) -> bool:
    """Whether every request computes one token: then a step has static shapes."""
    return batch.num_tokens == batch.num_requests


def plan_work(
    batch: Batch,
    window: int | None,
    *,
    tile_tokens: int,
    tile_keys: int,
    splitting: Splitting | None,
    takes_part: Bools | None = None,
) -> Work:
    """Divide a step, or the requests of it that take part, among programs, the longest first.

    Args:
        window: Sliding window of the KV group in tokens; None for none.
        tile_tokens: Most tokens of a tile of queries.
        tile_keys: Keys that a kernel takes at a time; ranges start at multiples of it, counted from position 0.
        splitting: None splits nothing, so that a row's arithmetic depends on its own position alone.
        takes_part: (num_requests,); None means all.
    """
    query_lens = np.diff(batch.query_start_locs)
    num_tiles = -(-query_lens // tile_tokens)
    if takes_part is not None:
        num_tiles *= takes_part
    requests = np.repeat(np.arange(batch.num_requests), num_tiles)  # of each tile, as all of the following
    offsets = _count_within(num_tiles) * tile_tokens
    counts = np.minimum(tile_tokens, query_lens[requests] - offsets)
    tokens = batch.query_start_locs[requests] + offsets
    positions = (batch.seq_lens - query_lens)[requests] + offsets
    last_keys = positions + counts
    first_keys = np.zeros_like(positions)
    if window is not None:
        first_keys = np.maximum(0, positions - window + 1) // tile_keys * tile_keys
    num_keys = last_keys - first_keys

    num_parts = np.ones_like(requests)
    if splitting:
        share = max(_MIN_PART_KEYS, -(-int(num_keys.sum()) // splitting.num_parts))
        share = -(-share // tile_keys) * tile_keys
        num_parts = np.where(num_tiles[requests] == 1, np.maximum(1, -(-num_keys // share)), 1)
        _fit_workspace(num_parts, counts, splitting.max_rows)
    is_split = num_parts > 1
    num_rows = counts * num_parts * is_split
    first_rows = np.cumsum(num_rows) - num_rows

    part, tile = _count_within(num_parts), np.repeat(np.arange(len(requests)), num_parts)
    part_keys = _round_up(-(-num_keys // num_parts), tile_keys)[tile]
    first_part_keys = first_keys[tile] + part * part_keys
    last_part_keys = np.minimum(last_keys[tile], first_part_keys + part_keys)
    rows = np.where(is_split[tile], first_rows[tile] + part * counts[tile], -1)
    columns = (requests[tile], tokens[tile], counts[tile], positions[tile], first_part_keys, last_part_keys, rows)
    longest_first = np.argsort(first_part_keys - last_part_keys, kind="stable")
    num_items = len(requests) + (splitting.num_parts if splitting else 0)
    items = _padded(np.stack(columns, axis=1)[longest_first], num_items)

    merged = np.repeat(np.flatnonzero(is_split), counts[is_split])
    row = _count_within(counts[is_split])
    merge_columns = (tokens[merged] + row, first_rows[merged] + row, num_parts[merged], counts[merged])
    merges = np.stack(merge_columns, axis=1)
    if splitting and is_decode(batch):  # each that is split has more than an even share of keys
        merges = _padded(merges, min(batch.num_tokens, splitting.num_parts))
    return Work(items, merges)


def _fit_workspace(num_parts: Ints, counts: Ints, max_rows: int) -> None:
    """Split tiles into fewer parts where the workspace has no rows left for more; tiles of fewer tokens go first."""
    split = np.flatnonzero(num_parts > 1)
    if (counts * num_parts)[split].sum() <= max_rows:
        return
    left = max_rows
    for tile in split[np.argsort(counts[split], kind="stable")]:
        num_parts[tile] = max(1, min(num_parts[tile], left // counts[tile]))
        left -= counts[tile] * num_parts[tile] * (num_parts[tile] > 1)


def _count_within(counts: Ints) -> Ints:
    """0, 1, .. count - 1 for each count, one after another."""
    counted: Ints = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return counted


def _round_up(values: Ints, multiple: int) -> Ints:
    rounded: Ints = -(-values // multiple) * multiple
    return rounded


def _padded(rows: Ints, num_rows: int) -> Ints:
    """Rows of zeros behind the given ones, which are no more than num_rows."""
    padded = np.zeros((num_rows, rows.shape[1]), np.int64)
    padded[: len(rows)] = rows
    return padded
