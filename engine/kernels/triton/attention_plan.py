"""Plans on the host, with numpy, what the programs of `attend_kernel` and `merge_kernel` do in a step.

The plan is a list of items. An item is one tile of queries of one request and one range of its keys. A request with a
long context and few queries is split into several items, so that few requests keep a whole GPU busy and a long one does
not outlast the others; the load of the step decides into how many. The number of items, and of merges of a decode step,
depends only on the numbers of requests and tokens, because a captured graph cannot change its grid. Left-over items
stay empty, and their programs end at once. Imports neither torch nor triton.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.engine.step.batch import Batch, Ints

Bools = npt.NDArray[np.bool_]

# Request (later the place of its block table), first token of the step, number of tokens, position of the first one,
# first key, end of the keys, and the workspace row for a part's result, or -1.
NUM_ITEM_FIELDS = 7

# Token of the step, workspace row of its first part, number of parts, rows from one part to the next.
NUM_MERGE_FIELDS = 4

# With fewer keys, merging a part costs more than splitting gains.
_MIN_PART_KEYS = 128


@dataclass(frozen=True, slots=True)
class Splitting:
    """How far contexts are split.

    Attributes:
        num_parts: Number of parts that a step aims at, per K/V head.
        max_rows: Rows of the workspace, one per part of each token; at least num_parts + the most requests.
    """

    num_parts: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class Work:
    """Items (num_items, NUM_ITEM_FIELDS) and merges (num_merges, NUM_MERGE_FIELDS) of a step for one KV group."""

    items: Ints
    merges: Ints


def is_decode(batch: Batch) -> bool:
    """Whether every request computes one token, so that the step has static shapes."""
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
    """Divide the requests of a step that take part into items, the longest first.

    Args:
        window: Sliding window of the KV group in tokens; None for none.
        tile_tokens: Most tokens in a tile of queries.
        tile_keys: Keys that a kernel takes at a time; ranges start at its multiples, counted from position 0.
        splitting: None splits nothing: a row's arithmetic then depends on its own position alone.
        takes_part: (num_requests,); None means all.
    """
    query_lens = np.diff(batch.query_start_locs)
    num_tiles = -(-query_lens // tile_tokens)
    if takes_part is not None:
        num_tiles *= takes_part
    requests = np.repeat(np.arange(batch.num_requests), num_tiles)  # one entry per tile, like the arrays below
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
    if splitting and is_decode(batch):  # every split request has more than an even share of keys
        merges = _padded(merges, min(batch.num_tokens, splitting.num_parts))
    return Work(items, merges)


def _fit_workspace(num_parts: Ints, counts: Ints, max_rows: int) -> None:
    """Reduce num_parts if the workspace has too few rows; tiles with fewer tokens get theirs first."""
    split = np.flatnonzero(num_parts > 1)
    if (counts * num_parts)[split].sum() <= max_rows:
        return
    left = max_rows
    for tile in split[np.argsort(counts[split], kind="stable")]:
        num_parts[tile] = max(1, min(num_parts[tile], left // counts[tile]))
        left -= counts[tile] * num_parts[tile] * (num_parts[tile] > 1)


def _count_within(counts: Ints) -> Ints:
    """0, 1, .. count - 1 for each count, concatenated."""
    counted: Ints = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return counted


def _round_up(values: Ints, multiple: int) -> Ints:
    rounded: Ints = -(-values // multiple) * multiple
    return rounded


def _padded(rows: Ints, num_rows: int) -> Ints:
    """Append rows of zeros, up to num_rows in all."""
    padded = np.zeros((num_rows, rows.shape[1]), np.int64)
    padded[: len(rows)] = rows
    return padded
