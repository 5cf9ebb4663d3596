"""What the programs of a step are given to do, without a device."""

import numpy as np
import pytest

from tests.engine.paged import PagedRequests
from weft.engine.kernels.triton.attention_plan import Splitting, Work, plan_work
from weft.engine.step.batch import Batch

SPLITTING = Splitting(num_parts=8, max_rows=8 + 16)


def make_batch(*computed_and_scheduled: tuple[int, int]) -> Batch:
    paged = PagedRequests(400, 16, (None,))
    requests = [paged.add(np.zeros(sum(counts), np.int64)) for counts in computed_and_scheduled]
    for request, (computed, _) in zip(requests, computed_and_scheduled, strict=True):
        request.num_computed_tokens = computed
    return paged.make_batch([(r, n) for r, (_, n) in zip(requests, computed_and_scheduled, strict=True)])


def plan(batch: Batch, window: int | None = None, splitting: Splitting | None = SPLITTING) -> Work:
    return plan_work(batch, window, tile_tokens=4, tile_keys=64, splitting=splitting)


def test_a_prompt_is_cut_into_tiles_and_the_longest_comes_first() -> None:
    work = plan(make_batch((0, 6), (100, 3)), splitting=None)
    # request, token, tokens, position, first key, last key, row
    assert work.items.tolist() == [[1, 6, 3, 100, 0, 103, -1], [0, 4, 2, 4, 0, 6, -1], [0, 0, 4, 0, 0, 4, -1]]
    assert work.merges.shape == (0, 4)


def test_some_requests_alone_may_take_part() -> None:
    batch = make_batch((0, 6), (999, 1))
    work = plan_work(batch, None, tile_tokens=4, tile_keys=64, splitting=SPLITTING, takes_part=np.array([False, True]))
    assert [item[:4] for item in work.items.tolist()] == [[1, 6, 1, 999]] * 8 + [[0] * 4]
    assert work.merges.tolist() == [[6, 0, 8, 1]]


def test_long_contexts_are_split_into_even_parts_at_whole_tiles_of_keys() -> None:
    work = plan(make_batch((0, 1), (999, 1)))
    # An eighth of 1,001 keys in whole tiles: 128. Of 1,000 that makes 8 parts.
    split = [[1, 1, 1, 999, start, min(start + 128, 1000), start // 128] for start in range(0, 1000, 128)]
    assert work.items.tolist() == [*split, [0, 0, 1, 0, 0, 1, -1], [0] * 7]
    assert work.merges.tolist() == [[1, 0, 8, 1], [0] * 4]


def test_all_tokens_of_a_split_request_are_merged() -> None:
    work = plan(make_batch((298, 3), (10, 4)))
    assert [item[2:] for item in work.items.tolist() if item[0] == 0 and item[2]] == [
        [3, 298, 0, 128, 0],
        [3, 298, 128, 256, 3],
        [3, 298, 256, 301, 6],
    ]
    assert work.merges.tolist() == [[0, 0, 3, 3], [1, 1, 3, 3], [2, 2, 3, 3]]


def test_the_workspace_is_never_exceeded() -> None:
    work = plan(make_batch(*[(600, 4)] * 3), splitting=Splitting(num_parts=12, max_rows=30))
    assert work.items[:, 6].max() + 4 <= 30
    assert [merge[2] for merge in work.merges.tolist()] == [4] * 4 + [3] * 4


def test_a_chunk_that_needs_too_many_rows_is_split_less_and_takes_none_of_the_others() -> None:
    work = plan(make_batch((2000, 4), (1999, 1), (1999, 1)), splitting=Splitting(num_parts=12, max_rows=16))
    assert {merge[0]: merge[2] for merge in work.merges.tolist()} == {4: 4, 5: 4} | dict.fromkeys(range(4), 2)


def test_keys_begin_where_the_window_does_in_whole_tiles() -> None:
    work = plan(make_batch((299, 2)), window=100, splitting=None)
    assert work.items.tolist() == [[0, 0, 2, 299, 192, 301, -1]]


@pytest.mark.parametrize("window", [None, 70])
def test_every_key_of_every_token_is_in_one_item_and_shapes_follow_from_counts_alone(window: int | None) -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        num_requests = int(random.integers(1, 8))
        batch = make_batch(*[(int(n), 1) for n in random.choice([0, 3, 127, 128, 700], num_requests)])
        work = plan(batch, window)
        assert work.items.shape == (num_requests + SPLITTING.num_parts, 7)
        assert work.merges.shape == (min(num_requests, SPLITTING.num_parts), 4)
        assert work.items[:, 6].max() < SPLITTING.max_rows
        for request, seq_len in enumerate(batch.seq_lens):
            spans = sorted(item[4:6].tolist() for item in work.items if item[2] and item[0] == request)
            first = 0 if window is None else max(0, int(seq_len) - window) // 64 * 64
            assert spans[0][0] == first
            assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]]
            assert spans[-1][1] == seq_len
