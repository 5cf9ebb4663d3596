"""Batches for attention and model tests: requests whose blocks lie scattered over the cache.

Stands in for the scheduler: each request has a block table per KV group, blocks that fell out of a sliding window
turn into the null block, and `make_batch` flattens what is scheduled.
"""

from dataclasses import dataclass

import numpy as np

from weft.engine.batch import Batch, GroupBatch, Placeholders, SamplingBatch
from weft.engine.cache.specs import PagedKV

NO_INTS = np.zeros(0, np.int64)
NO_FLOATS = np.zeros(0, np.float32)
NO_COPIES = np.zeros((0, 2), np.int64)


def paged_specs(*windows: int | None) -> tuple[PagedKV, ...]:
    """The specs of groups with these windows, for whom sizes of heads do not matter."""
    return tuple(PagedKV(1, 8, window) for window in windows)


@dataclass(eq=False)
class PagedRequest:
    """A request of a test: its tokens, how many of them are computed, and its blocks, per KV group."""

    token_ids: np.ndarray
    tables: list[np.ndarray]
    num_computed_tokens: int = 0


class PagedRequests:
    """Hands out scattered blocks of one cache."""

    def __init__(
        self, num_blocks: int, block_size: int, windows: tuple[int | PagedKV | None, ...], seed: int = 0
    ) -> None:
        """For each KV group a sliding window, None for full attention, or its spec."""
        self.block_size = block_size
        self.specs = [window if isinstance(window, PagedKV) else PagedKV(1, 8, window) for window in windows]
        generator = np.random.default_rng(seed)
        self._free = [list(generator.permutation(np.arange(1, num_blocks))) for _ in windows]

    def add(self, token_ids: np.ndarray) -> PagedRequest:
        """A request with blocks for all of its tokens."""
        num_blocks = -(-len(token_ids) // self.block_size)
        tables = [np.array([free.pop() for _ in range(num_blocks)], np.int64) for free in self._free]
        return PagedRequest(token_ids, tables)

    def make_batch(self, scheduled: list[tuple[PagedRequest, int]], copies: np.ndarray = NO_COPIES) -> Batch:
        """Schedule the next n tokens of each request, and count them as computed."""
        starts = [request.num_computed_tokens for request, _ in scheduled]
        positions = [np.arange(start, start + count) for start, (_, count) in zip(starts, scheduled, strict=True)]
        groups = tuple(
            self._group_batch(group, [request for request, _ in scheduled], positions, copies)
            for group in range(len(self.specs))
        )
        for request, count in scheduled:
            request.num_computed_tokens += count
        query_ends = np.cumsum([count for _, count in scheduled])
        return Batch(
            token_ids=np.concatenate([r.token_ids[p] for (r, _), p in zip(scheduled, positions, strict=True)]),
            positions=np.concatenate(positions),
            placeholders=Placeholders(NO_INTS, NO_INTS),
            query_start_locs=np.concatenate(([0], query_ends)),
            seq_lens=np.array([request.num_computed_tokens for request, _ in scheduled]),
            groups=groups,
            row_indices=query_ends - 1,
            sampling=no_sampling(),
        )

    def _group_batch(
        self, group: int, requests: list[PagedRequest], positions: list[np.ndarray], copies: np.ndarray
    ) -> GroupBatch:
        tables = np.zeros((len(requests), max(len(r.tables[group]) for r in requests)), np.int64)
        slots = []
        for row, request, at in zip(tables, requests, positions, strict=True):
            table = request.tables[group]
            table[: self.specs[group].first_seen(request.num_computed_tokens) // self.block_size] = 0
            row[: len(table)] = table
            slots.append(table[at // self.block_size] * self.block_size + at % self.block_size)
        return GroupBatch(np.concatenate(slots), tables, copies)


def no_sampling() -> SamplingBatch:
    """A sampling part without rows."""
    return SamplingBatch(
        temperatures=NO_FLOATS,
        top_ks=NO_INTS,
        top_ps=NO_FLOATS,
        min_ps=NO_FLOATS,
        uniforms=NO_FLOATS,
        num_logprobs=NO_INTS,
        bias_rows=NO_INTS,
        bias_ids=NO_INTS,
        bias_values=NO_FLOATS,
        allowed_rows=NO_INTS,
        allowed_entries=NO_INTS,
        allowed_ids=NO_INTS,
    )
