"""What the programs of a step are given to do, without a device."""

import dataclasses

import numpy as np
import pytest

from tests.engine.paged import PagedRequests
from weft.engine.batch import Batch, GraphKey
from weft.engine.cache.specs import PagedKV
from weft.engine.kernels.triton.attention_plan import Bools, Tiling, Work, plan_work

MAX_NUM_SEQS = 8
SHORT = Tiling(2, 64, num_parts=8, least_part_keys=128, max_num_seqs=MAX_NUM_SEQS)
OTHERS = Tiling(
    4, 64, least_tokens=3, num_parts=8, least_part_keys=128, splits_late=True, max_num_seqs=MAX_NUM_SEQS
)  # fmt: skip
WHOLE = Tiling(4, 64, max_num_seqs=MAX_NUM_SEQS)


def make_batch(*computed_and_scheduled: tuple[int, int]) -> Batch:
    paged = PagedRequests(40_000, 16, (None,))
    requests = [paged.add(np.zeros(sum(counts), np.int64)) for counts in computed_and_scheduled]
    for request, (computed, _) in zip(requests, computed_and_scheduled, strict=True):
        request.num_computed_tokens = computed
    return paged.make_batch([(r, n) for r, (_, n) in zip(requests, computed_and_scheduled, strict=True)])


def plan(batch: Batch, *tilings: Tiling, window: int | None = None) -> Work:
    """Requests take part in the first launch if they fit one of its tiles and there is another launch."""
    query_lens = np.diff(batch.query_start_locs)
    parts: list[Bools] = [np.ones(batch.num_requests, np.bool_)]
    if len(tilings) > 1:
        parts = [query_lens <= tilings[0].tokens, query_lens > tilings[0].tokens]
    return plan_work(batch, PagedKV(1, 8, window).first_seen, list(zip(tilings, parts, strict=True)))


def test_a_prompt_is_cut_into_tiles_and_the_longest_comes_first() -> None:
    work = plan(make_batch((0, 6), (100, 3)), WHOLE)
    # request, token, tokens, position, first key, last key, row
    assert [items.tolist() for items in work.items] == [
        [[1, 6, 3, 100, 0, 103, -1], [0, 4, 2, 4, 0, 6, -1], [0, 0, 4, 0, 0, 4, -1]]
    ]
    assert work.merges.shape == (0, 4)


def test_each_launch_has_its_own_requests() -> None:
    short, others = plan(make_batch((0, 6), (999, 1), (5, 2)), SHORT, OTHERS).items
    assert [item[:4] for item in short.tolist()] == [[1, 6, 1, 999]] * 8 + [[2, 7, 2, 5]]
    assert [item[:4] for item in others.tolist()] == [[0, 4, 2, 4], [0, 0, 4, 0]]


def test_long_contexts_are_split_into_even_parts_at_whole_tiles_of_keys() -> None:
    work = plan(make_batch((0, 1), (999, 1)), SHORT)
    # An eighth of 1,001 keys in whole tiles: 128. Of 1,000 that makes 8 parts.
    split = [[1, 1, 1, 999, start, min(start + 128, 1000), start // 128] for start in range(0, 1000, 128)]
    assert work.items[0].tolist() == [*split, [0, 0, 1, 0, 0, 1, -1]]
    assert work.merges.tolist() == [[1, 0, 8, 1]]


def test_all_tokens_of_a_split_request_are_merged() -> None:
    work = plan(make_batch((299, 2), (11, 2)), SHORT)
    assert [item[2:] for item in work.items[0].tolist() if item[0] == 0] == [
        [2, 299, 0, 128, 0],
        [2, 299, 128, 256, 2],
        [2, 299, 256, 301, 4],
    ]
    assert work.merges.tolist() == [[0, 0, 3, 2], [1, 1, 3, 2]]


def test_requests_of_several_tiles_are_split_as_well() -> None:
    """Such requests had one program a tile: a few new tokens behind a long context left most of a GPU idle."""
    work = plan(make_batch((1994, 6)), OTHERS)
    # 3,998 keys in all, of which an eighth is 512: 3.9 shares a tile.
    assert work.items[0].tolist() == [
        [0, 0, 4, 1994, 0, 512, 0],
        [0, 4, 2, 1998, 0, 512, 16],
        [0, 0, 4, 1994, 512, 1024, 4],
        [0, 4, 2, 1998, 512, 1024, 18],
        [0, 0, 4, 1994, 1024, 1536, 8],
        [0, 4, 2, 1998, 1024, 1536, 20],
        [0, 4, 2, 1998, 1536, 2000, 22],
        [0, 0, 4, 1994, 1536, 1998, 12],
    ]
    assert work.merges.tolist() == [[i, i, 4, 4] for i in range(4)] + [[4, 16, 4, 2], [5, 17, 4, 2]]


def test_a_tile_of_hardly_more_than_its_share_stays_whole() -> None:
    """Merging it would cost more than the one long program that is left."""
    assert plan(make_batch((1000, 28)), OTHERS).merges.shape == (0, 4)
    assert plan(make_batch((1000, 20)), OTHERS).merges[:, 2].tolist() == [2] * 20


def test_launches_share_the_workspace_and_their_merges() -> None:
    work = plan(make_batch((999, 1), (1994, 6)), SHORT, OTHERS)
    assert work.items[0][:, 6].max() < SHORT.max_rows == 32 == work.items[1][:, 6].min()
    assert work.items[1][:, 6].max() < SHORT.max_rows + OTHERS.max_rows
    assert sorted(work.merges[:, 0].tolist()) == list(range(7))


def test_a_short_chunk_behind_a_long_context_fills_a_large_gpu() -> None:
    """132 multiprocessors, 32 heads and 8 K/V heads, the tiles for bfloat16: 4 programs each are aimed at."""
    chunk = Tiling(32, 64, least_tokens=5, num_parts=66, least_part_keys=1024, splits_late=True)
    ((items,), merges) = dataclasses.astuple(plan(make_batch((100_000, 128)), chunk))
    assert len(items) * 8 == 512 > 2 * 132  # unsplit they were 32
    assert (items[:, 5] - items[:, 4]).max() <= 1.1 * (items[:, 5] - items[:, 4]).mean()
    assert len(merges) == 128
    assert items[:, 6].max() + 32 <= chunk.max_rows == 2816


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_every_key_of_every_token_is_in_one_item(window: int | None, is_recorded: bool) -> None:
    """Of steps of any requests, in a graph or not; what a graph launches follows from its number of tokens alone."""
    random = np.random.default_rng(0)
    shapes = set()
    for _ in range(60):
        computed = random.choice([0, 3, 127, 128, 700, 1500], int(random.integers(1, MAX_NUM_SEQS + 1)))
        lens = random.choice([1, 2, 3, 4, 5, 8, 13], len(computed), p=[0.5, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05])
        batch = make_batch(*zip(computed.tolist(), lens.tolist(), strict=True))
        num_tokens = batch.num_tokens
        if is_recorded:
            batch, num_tokens = dataclasses.replace(batch, graph=GraphKey(104, False)), 104
        work = plan(batch, SHORT, OTHERS, window=window)
        shapes.add((*(items.shape for items in work.items), work.merges.shape))
        attended = check_keys(batch, work, window)
        assert attended == list(range(num_tokens)), "each token, padding too, in one place"
        check_rows(work)
    assert (len(shapes) == 1) == is_recorded


def check_keys(batch: Batch, work: Work, window: int | None) -> list[int]:
    """Each tile has all keys that its tokens see, once, in ranges that begin at tiles of keys; the tokens of tiles."""
    tiles: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for request, token, count, position, first, last, _ in np.concatenate(work.items).tolist():
        if count:
            tiles.setdefault((request, token, count, position), []).append((first, last))
    for (request, token, count, position), spans in tiles.items():
        if token >= batch.num_tokens:
            assert spans == [(0, 0)]
            continue
        assert batch.query_start_locs[request] <= token < token + count <= batch.query_start_locs[request + 1]
        assert batch.positions[token : token + count].tolist() == list(range(position, position + count))
        spans.sort()
        assert spans[0][0] == (0 if window is None else max(0, position - window + 1) // 64 * 64)
        assert [last for _, last in spans[:-1]] == [first for first, _ in spans[1:]]
        assert spans[-1][1] == position + count
        assert all(first % 64 == 0 and first < last for first, last in spans)
    return sorted(token + i for _, token, count, _ in tiles for i in range(count))


def check_rows(work: Work) -> None:
    """Parts do not share rows, stay within the workspace, and are all merged once, into the token that they are of."""
    rows: dict[int, int] = {}
    for _, token, count, _, _, _, first_row in np.concatenate(work.items).tolist():
        for i in range(count if first_row >= 0 else 0):
            assert rows.setdefault(first_row + i, token + i) == token + i
    assert len(rows) == sum(count for _, _, count, _, _, _, row in np.concatenate(work.items).tolist() if row >= 0)
    assert max(rows, default=0) < SHORT.max_rows + OTHERS.max_rows
    for token, first_row, num_parts, stride in work.merges.tolist():
        assert [rows.pop(first_row + part * stride) for part in range(num_parts)] == [token] * num_parts
    assert not rows


def test_a_graph_that_samples_has_one_item_a_token_besides_parts() -> None:
    for num_requests in range(MAX_NUM_SEQS + 1):
        batch = make_batch(*[(700 * number, 1) for number in range(num_requests)]) if num_requests else no_requests()
        work = plan(dataclasses.replace(batch, graph=GraphKey(8, True)), SHORT)
        assert [items.shape for items in work.items] == [(8 + SHORT.num_parts, 7)]
        assert work.merges.shape == (8, 4)
        attended = [(token, count) for _, token, count, *_ in work.items[0].tolist()]
        assert {token + i for token, count in attended for i in range(count)} == set(range(8))


def no_requests() -> Batch:
    batch = make_batch((0, 1))
    empty = {name: getattr(batch, name)[:0] for name in ("token_ids", "positions", "seq_lens")}
    return dataclasses.replace(batch, query_start_locs=np.zeros(1, np.int64), **empty)


@pytest.mark.parametrize("tiling", [SHORT, OTHERS, WHOLE])
def test_bounds_hold_for_the_steps_that_need_most(tiling: Tiling) -> None:
    """As many requests as there may be, each with one token more than fills its tiles."""
    for num_tokens in (24, 60, 104):
        most = 0
        for length in range(tiling.least_tokens, 14):
            num_requests = min(MAX_NUM_SEQS, num_tokens // length)
            for rest in (0, num_tokens - num_requests * length):  # none of them padding, or all
                counts = [length] * num_requests
                counts[-1] += rest
                batch = make_batch(*[(0, count) for count in counts])
                if tiling.least_tokens == 1:
                    batch = dataclasses.replace(batch, graph=GraphKey(num_tokens, False))
                (items,) = plan(batch, tiling).items
                most = max(most, int((items[:, 2] > 0).sum()))
        assert most <= tiling.max_items(num_tokens) - tiling.num_parts <= most + 1 + tiling.tokens
