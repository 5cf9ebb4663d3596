"""What the programs of `attend_kernel` and `merge_kernel` do in a step: a list of items, made on the host with numpy.

An item is one tile of queries of one request and one range of its keys. A request with a long context and few queries
is split into several items, so that few requests keep a whole GPU busy and a long one does not outlast the others; how
many parts it takes is decided by the load of the step. The *number* of items, and of merges of a decode step, is a
function of the numbers of requests and tokens alone, because a captured graph cannot change its grid: what is left over
stays empty and ends at once. Imports neither torch nor triton.
"""

from dataclasses import dataclass

import numpy as np

from engine.batch import Batch, Ints

NUM_ITEM_FIELDS = 7
"""Request (`pack` turns it into where its block table starts), first token of the step, number of tokens, position of
the first one, first key, behind the last key, and the row in the workspace that a part's result goes to, or -1."""

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
    skips_prompts: bool = False,
) -> Work:
    """Divide a step among programs, the longest first.

    Args:
        window: Sliding window of the KV group in tokens; None for none.
        tile_tokens: Most tokens of a tile of queries.
        tile_keys: Keys that a kernel takes at a time; ranges start at multiples of it, counted from position 0.
        splitting: None splits nothing, so that a row's arithmetic depends on its own position alone.
        skips_prompts: Leave requests of several tokens to others.
    """
    query_lens = np.diff(batch.query_start_locs)
    num_tiles = -(-query_lens // tile_tokens)
    if skips_prompts:
        num_tiles[query_lens > 1] = 0
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
        num_parts[np.cumsum(counts * num_parts * (num_parts > 1)) > splitting.max_rows] = 1
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
    num_items = len(requests) + (splitting.num_parts if splitting and len(requests) else 0)
    items = _padded(np.stack(columns, axis=1)[longest_first], num_items)

    merged = np.repeat(np.flatnonzero(is_split), counts[is_split])
    row = _count_within(counts[is_split])
    merge_columns = (tokens[merged] + row, first_rows[merged] + row, num_parts[merged], counts[merged])
    merges = np.stack(merge_columns, axis=1)
    if splitting and is_decode(batch):
        merges = _padded(merges, batch.num_tokens)
    return Work(items, merges)


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
