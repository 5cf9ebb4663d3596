"""Plans on the host, with numpy, what the programs of `attend_kernel` and `merge_kernel` do in a step.

The plan is a list of items for each launch. An item is one tile of queries of one request and one range of its keys.
Tiles with long contexts are split into several items, so that few requests keep a whole GPU busy and a long one does
not outlast the others; the load of the launch decides into how many. A captured graph cannot change its grid. So in a
recorded step the numbers of items and merges are bounds that follow from its number of tokens. Left-over items stay
empty, and their programs end at once. Imports neither torch nor triton.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.engine.batch import Batch, GraphKey, Ints

Bools = npt.NDArray[np.bool_]

# Positions of tokens -> the first positions that they see.
FirstSeen = Callable[[Ints], Ints]

# Request (later the place of its block table), first token of the step, number of tokens, position of the first one,
# first key, end of the keys, and the workspace row for a part's result, or -1.
NUM_ITEM_FIELDS = 7

# Token of the step, workspace row of its first part, number of parts, rows from one part to the next.
NUM_MERGE_FIELDS = 4

# More than any position. Orders items by two numbers in one.
_BEHIND_ALL_KEYS = 1 << 31


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the requests of a launch are divided.

    Attributes:
        tokens: Most tokens in a tile of queries.
        keys: Keys that a kernel takes at a time; ranges start at its multiples, counted from position 0.
        least_tokens: Fewest tokens of a request.
        num_parts: Number of parts of contexts that the launch aims at, per K/V head. 0 splits nothing: a row's
            arithmetic then depends on its own position alone.
        least_part_keys: Fewest keys of a part.
        splits_late: Whether a tile stays whole up to one and a half even shares of the keys, instead of one.
        max_num_seqs: Most requests of a step.
    """

    tokens: int
    keys: int
    least_tokens: int = 1
    num_parts: int = 0
    least_part_keys: int = 0
    splits_late: bool = False
    max_num_seqs: int = 1 << 30

    @property
    def max_rows(self) -> int:
        """Most workspace rows, one for each part of each token.

        Shares sum up to num_parts at most. A tile of x > 1 shares makes less than x + 1 < 2 x parts. If split late, one
        of x > 1.5 shares makes less than x + 0.5 < 4 / 3 x parts.
        """
        return -(-self.num_parts * self.tokens * 4 // 3) if self.splits_late else self.num_parts * self.tokens * 2

    def max_items(self, num_tokens: int) -> int:
        """Most items of a step with so many tokens, padding included.

        A request opens a tile with its first token and more tiles with the tokens behind, as does padding.
        """
        num_requests = min(num_tokens // self.least_tokens, self.max_num_seqs)
        return num_requests + -(-(num_tokens - num_requests) // self.tokens) + self.num_parts


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes for one KV group.

    Attributes:
        items: Per launch, (num_items, NUM_ITEM_FIELDS).
        merges: Of all launches, (num_merges, NUM_MERGE_FIELDS).
    """

    items: list[Ints]
    merges: Ints


def plan_work(batch: Batch, first_seen: FirstSeen, launches: Sequence[tuple[Tiling, Bools]]) -> Work:
    """Divide the requests of a step into items, in each launch the longest first.

    In a recorded step the first launch has items for the padding, too. These see no keys, so that padding gets zeros.

    Args:
        first_seen: Of the KV group.
        launches: How each is divided, and which requests take part in it, (num_requests,). Results of parts lie in rows
            of one workspace, the max_rows of a launch behind those of the launches before it.
    """
    items: list[Ints] = []
    merges = [np.zeros((0, NUM_MERGE_FIELDS), np.int64)]
    first_row = 0
    for tiling, takes_part in launches:
        planned = _plan_launch(batch, first_seen, tiling, takes_part, first_row)
        items.append(planned[0])
        merges.append(planned[1])
        first_row += tiling.max_rows
    work = Work(items, np.concatenate(merges))
    return work if batch.graph is None else _padded(work, batch, batch.graph, [tiling for tiling, _ in launches])


def _padded(work: Work, batch: Batch, graph: GraphKey, tilings: list[Tiling]) -> Work:
    """Add items for the padding, then empty items and merges as far as any step of the graph may need them."""
    items = [np.zeros((tiling.max_items(graph.num_tokens), NUM_ITEM_FIELDS), np.int64) for tiling in tilings]
    for padded, own in zip(items, work.items, strict=True):
        padded[: len(own)] = own
    tile = tilings[0].tokens
    tokens = np.arange(batch.num_tokens, graph.num_tokens, tile)
    padding = items[0][len(work.items[0]) :][: len(tokens)]
    padding[:, 1], padding[:, 2], padding[:, 6] = tokens, np.minimum(tile, graph.num_tokens - tokens), -1
    # A split tile has more than an even share of the keys.
    most = sum(tiling.num_parts * (1 if graph.samples else tiling.tokens) for tiling in tilings)
    merges = np.zeros((min(graph.num_tokens, most), NUM_MERGE_FIELDS), np.int64)
    merges[: len(work.merges)] = work.merges
    return Work(items, merges)


def _plan_launch(
    batch: Batch, first_seen: FirstSeen, tiling: Tiling, takes_part: Bools, first_row: int
) -> tuple[Ints, Ints]:
    """Items and merges of a launch."""
    if not takes_part.any():
        return np.zeros((0, NUM_ITEM_FIELDS), np.int64), np.zeros((0, NUM_MERGE_FIELDS), np.int64)
    requests, tokens, counts, positions = _cut(batch, tiling.tokens, takes_part)
    last_keys = batch.seq_lens[requests] if batch.is_mutual else positions + counts
    first_keys = first_seen(positions) // tiling.keys * tiling.keys
    num_parts, part_keys = _split(last_keys - first_keys, tiling)
    is_split = num_parts > 1
    if not is_split.any():
        rows = np.full(len(requests), -1)
        items = _longest_first((requests, tokens, counts, positions, first_keys, last_keys, rows))
        return items, np.zeros((0, NUM_MERGE_FIELDS), np.int64)
    num_rows = counts * num_parts * is_split
    first_rows = np.cumsum(num_rows) - num_rows + first_row
    assert num_rows.sum() <= tiling.max_rows

    tile, part = np.repeat(np.arange(len(requests)), num_parts), _count_within(num_parts)
    first_part_keys = first_keys[tile] + part * part_keys[tile]
    last_part_keys = np.minimum(last_keys[tile], first_part_keys + part_keys[tile])
    rows = np.where(is_split[tile], first_rows[tile] + part * counts[tile], -1)
    whole = requests[tile], tokens[tile], counts[tile], positions[tile]
    items = _longest_first((*whole, first_part_keys, last_part_keys, rows))

    merged = np.repeat(np.flatnonzero(is_split), counts[is_split])
    row = _count_within(counts[is_split])
    merges = tokens[merged] + row, first_rows[merged] + row, num_parts[merged], counts[merged]
    return items, np.stack(merges, axis=1)


def _cut(batch: Batch, tile_tokens: int, takes_part: Bools) -> tuple[Ints, Ints, Ints, Ints]:
    """Tiles of queries: request, first token of the step, number of tokens, position of the first one."""
    requests = np.flatnonzero(takes_part)
    tokens = batch.query_start_locs[requests]
    query_lens = batch.query_start_locs[requests + 1] - tokens
    positions = batch.seq_lens[requests] - query_lens
    if not (query_lens > tile_tokens).any():
        return requests, tokens, query_lens, positions
    num_tiles = -(-query_lens // tile_tokens)
    at = np.repeat(np.arange(len(requests)), num_tiles)
    offsets = _count_within(num_tiles) * tile_tokens
    counts = np.minimum(tile_tokens, query_lens[at] - offsets)
    return requests[at], tokens[at] + offsets, counts, positions[at] + offsets


def _split(num_keys: Ints, tiling: Tiling) -> tuple[Ints, Ints]:
    """Number of parts of each tile, and the keys of a part, in whole tiles of keys."""
    ones = np.ones_like(num_keys)
    if not tiling.num_parts or not len(num_keys):
        return ones, num_keys
    share = max(tiling.least_part_keys, -(-int(num_keys.sum()) // tiling.num_parts))
    share = -(-share // tiling.keys) * tiling.keys
    excess = share // 2 * tiling.splits_late
    if num_keys.max() <= share + excess:
        return ones, num_keys
    num_parts = np.maximum(ones, -((excess - num_keys) // share))
    part_keys = -(-num_keys // (num_parts * tiling.keys)) * tiling.keys
    return -(-num_keys // part_keys), part_keys  # rounding up may have made the last part empty


def _longest_first(columns: tuple[Ints, ...]) -> Ints:
    """Stack the columns of items in their order of launch.

    Items of equal length are ordered by their keys, so that tiles of one request read the same keys at the same time.
    """
    first_keys, last_keys = columns[4:6]
    order = np.argsort((first_keys - last_keys) * _BEHIND_ALL_KEYS + first_keys, kind="stable")
    return np.stack(columns)[:, order].T


def _count_within(counts: Ints) -> Ints:
    """0, 1, .. count - 1 for each count, concatenated."""
    counted: Ints = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return counted
