"""The notes of what a draft model's cache holds."""

import numpy as np
import pytest

from tests.engine.requests_for_tests import request as make_request
from weft.engine.batch import GroupBatch, Ints
from weft.engine.request import Request
from weft.engine.start.draft_cache import DraftCache

BLOCK_SIZE = 4
NO_COPIES = np.zeros((0, 2), np.int64)


@pytest.fixture
def request_() -> Request:
    """Ten tokens in the blocks 5, 2 and 7, with room for two more."""
    request = make_request(list(range(100, 110)))
    request.block_tables = [[5, 2, 7]]
    return request


@pytest.fixture
def cache(request_: Request) -> DraftCache:
    """Holds all but the last token."""
    cache = DraftCache(9, BLOCK_SIZE, 0)
    cache.note(request_, 0, request_.token_ids[:9], 9)
    return cache


def written(slots: list[int], copies: Ints = NO_COPIES) -> GroupBatch:
    return GroupBatch(np.array(slots, np.int64), np.zeros((1, 1), np.int64), copies)


def fresh(request: Request) -> Request:
    """Another request with the same tokens and blocks, of which nothing is known."""
    other = make_request(list(request.token_ids))
    other.block_tables = request.block_tables
    return other


def test_nothing_is_right_at_first(request_: Request) -> None:
    assert DraftCache(9, BLOCK_SIZE, 0).num_right(request_) == 0


def test_what_was_computed_is_right_for_all_who_share_it(cache: DraftCache, request_: Request) -> None:
    assert cache.num_right(request_) == cache.num_right(fresh(request_)) == 9
    request_.token_ids[6] = 7
    assert cache.num_right(fresh(request_)) == 6


@pytest.mark.parametrize(("drafted", "right"), [([30, 31, 32], 12), ([30, 8, 32], 11), ([8, 31, 32], 10)])
def test_drafts_are_right_up_to_the_first_that_was_refused(
    cache: DraftCache, request_: Request, drafted: list[int], right: int
) -> None:
    request_.block_tables[0].append(1)
    cache.note(request_, 9, [109, *drafted], 1)
    request_.token_ids += [30, 31, 33]
    assert cache.num_right(request_) == right


def test_drafts_behind_a_refused_one_are_never_right(cache: DraftCache, request_: Request) -> None:
    request_.block_tables[0].append(1)
    cache.note(request_, 9, [109, 30, 31, 32], 1)
    request_.token_ids.append(8)  # in place of 30
    cache.note(request_, 10, [8], 1)
    request_.token_ids += [31, 32]  # as drafted, but behind another token
    assert cache.num_right(request_) == 11


def test_a_block_with_new_content_is_forgotten(cache: DraftCache, request_: Request) -> None:
    cache.forget(written([2 * BLOCK_SIZE + 1, 7 * BLOCK_SIZE + 2]))  # in the middle: these were there before
    assert cache.num_right(fresh(request_)) == 9
    cache.forget(written([2 * BLOCK_SIZE]))
    assert cache.num_right(fresh(request_)) == BLOCK_SIZE
    cache.forget(written([], np.array([[2, 5]])))
    assert cache.num_right(fresh(request_)) == 0


def test_a_request_that_was_preempted_has_other_blocks(cache: DraftCache, request_: Request) -> None:
    request_.block_tables = [[1, 3, 4]]
    request_.num_preemptions += 1
    assert cache.num_right(request_) == 0


def test_blocks_that_left_a_window_need_not_be_there(cache: DraftCache, request_: Request) -> None:
    request_.block_tables = [[0, 2, 7]]
    assert cache.num_right(fresh(request_)) == 9
