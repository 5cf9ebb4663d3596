"""Block size 4 throughout; block ids are literal."""

import pytest
import torch

from tests.engine.paged import paged_specs
from tests.engine.requests_for_tests import find_prefix, request
from weft.engine.cache.manager import KVCacheManager
from weft.engine.cache.specs import PagedKV, StateSpec
from weft.engine.request import Request
from weft.engine.wire.options import Adapter

PROMPT = list(range(10))


def manager(num_blocks: int = 20, *windows: int | None, prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, paged_specs(*(windows or (None,))), prefix_caching)


def compute(kv: KVCacheManager, r: Request, num_tokens: int) -> None:
    """What the scheduler does for tokens that have slots."""
    r.num_computed_tokens += num_tokens
    kv.index_computed_blocks(r)


def admit(kv: KVCacheManager, r: Request) -> int:
    """Admit a request and compute all its tokens; returns how many were cached."""
    num_cached = find_prefix(kv, r)
    assert kv.admit(r, num_cached, r.num_tokens - num_cached)
    compute(kv, r, r.num_new_tokens)
    return num_cached


def tables(r: Request) -> list[list[int]]:
    return [list(table) for table in r.block_tables]


def test_full_blocks_are_shared_while_their_first_owner_runs() -> None:
    kv = manager()
    first, second = request(PROMPT, 0), request(PROMPT, 1)
    assert admit(kv, first) == 0
    assert admit(kv, second) == 8
    assert tables(first) == [[1, 2, 3]]
    assert tables(second) == [[1, 2, 4]]
    kv.check_integrity([first, second])


def test_full_blocks_are_found_after_their_owner_has_gone_and_the_end_is_evicted_first() -> None:
    kv = manager(6)
    first = request(PROMPT, 0)
    admit(kv, first)
    kv.free(first)
    assert kv.num_free_blocks == 5
    other = request([99] * 13, 1)
    assert admit(kv, other) == 0
    assert tables(other) == [[3, 4, 5, 2]]  # block 1, the beginning of the first prompt, stays
    assert find_prefix(kv, request(PROMPT, 2)) == 4


@pytest.mark.parametrize(("num_tokens", "num_found"), [(4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_at_least_one_token_is_left_to_compute(num_tokens: int, num_found: int) -> None:
    kv = manager()
    admit(kv, request(PROMPT, 0))
    assert find_prefix(kv, request(PROMPT[:num_tokens], 1)) == num_found


def test_a_difference_in_an_early_block_hides_the_later_ones() -> None:
    kv = manager()
    admit(kv, request(PROMPT, 0))
    assert find_prefix(kv, request([50, *PROMPT[1:]], 1)) == 0
    assert find_prefix(kv, request([*PROMPT[:7], 50, *PROMPT[8:]], 2)) == 4


def test_output_tokens_are_found_by_the_next_turn() -> None:
    kv = manager()
    first = request(PROMPT, 0)
    admit(kv, first)
    for token_id in (70, 71, 72):
        first.append(token_id)
        assert kv.allocate(first, 1)
        compute(kv, first, 1)
    kv.free(first)
    assert find_prefix(kv, request([*PROMPT, 70, 71, 5], 1)) == 12


def test_placeholders_and_drafts_are_not_indexed() -> None:
    kv = manager()
    r = request(PROMPT[:7], 0)
    admit(kv, r)
    r.num_placeholders = 1
    assert kv.allocate(r, 1)
    compute(kv, r, 1)
    assert kv.pools[0].num_indexed == 1
    r.num_placeholders = 0
    r.append(7)
    kv.index_computed_blocks(r)
    assert kv.pools[0].num_indexed == 2


def test_slots_are_reserved_as_far_as_there_are_blocks_and_none_in_a_shared_block() -> None:
    kv = manager(6)
    r = request(PROMPT, 0)
    admit(kv, r)
    assert kv.reserve(r, 2) == 2
    assert tables(r) == [[1, 2, 3]]
    assert kv.reserve(r, 5) == 5
    assert tables(r) == [[1, 2, 3, 4]]
    assert kv.reserve(r, 20) == 6  # there is no room for all of them, so those that it holds already
    assert tables(r) == [[1, 2, 3, 4]]
    assert (r.num_computed_tokens, kv.num_free_blocks) == (10, 1)
    child = request(PROMPT, 1)
    kv.fork(r, child)
    assert kv.reserve(r, 2) == 0
    assert kv.take_step_blocks().copies == [{}]
    kv.check_integrity([r, child])


def test_without_prefix_caching_nothing_is_found_and_nobody_waits() -> None:
    kv = manager(prefix_caching=False)
    admit(kv, request(PROMPT, 0))
    later = request(PROMPT, 1)
    assert find_prefix(kv, later) == 0
    assert not kv.awaited_hash(later, 0)
    assert kv.pools[0].num_indexed == 0


def test_an_unscored_prompt_reads_nothing_but_serves_others() -> None:
    kv = manager()
    admit(kv, request(PROMPT, 0, prompt_logprobs=0))
    scored = request(PROMPT, 1, prompt_logprobs=0)
    assert find_prefix(kv, scored) == 0
    assert find_prefix(kv, request(PROMPT, 2)) == 8
    scored.num_scored_tokens = 10  # preempted after its scores were reported
    assert find_prefix(kv, scored) == 8


def test_cache_seed_differs_with_each_part_and_between_engines() -> None:
    kv = manager()
    parts: list[tuple[str, Adapter | None]] = [
        ("", None),
        ("a", None),
        ("", Adapter("", "/a", "")),
        ("", Adapter("a", "/a", "0")),
        ("", Adapter("a", "/a", "1")),
    ]
    assert len({kv.hashes.seed(*p) for p in parts}) == len(parts)
    assert kv.hashes.seed("a", None) == kv.hashes.seed("a", None)
    assert kv.hashes.seed("a", None) != manager().hashes.seed("a", None)


def test_other_seeds_find_nothing() -> None:
    kv = manager()
    admit(kv, request(PROMPT, 0, cache_seed=kv.hashes.seed("", None)))
    lora = Adapter("lora", "/lora", "0")
    for number, parts in enumerate([("salt", None), ("", lora)], 1):
        assert find_prefix(kv, request(PROMPT, number, cache_seed=kv.hashes.seed(*parts))) == 0
    assert find_prefix(kv, request(PROMPT, 9, cache_seed=kv.hashes.seed("", None))) == 8


def test_followers_wait_for_a_leader_block_by_block() -> None:
    kv = manager()
    leader, follower, other = request(PROMPT, 0), request(PROMPT, 1), request([*PROMPT[:4], 60, 61, 62, 63, 64], 2)
    woken: list[bytes] = []
    kv.wake_followers = woken.append
    assert find_prefix(kv, leader) == 0
    assert kv.admit(leader, 0, 4)
    assert find_prefix(kv, follower) == find_prefix(kv, other) == 0
    first, second = leader.block_hashes
    assert (kv.awaited_hash(follower, 0), kv.awaited_hash(other, 0)) == (second, first)
    compute(kv, leader, 4)
    assert find_prefix(kv, follower) == find_prefix(kv, other) == 4
    assert (kv.awaited_hash(follower, 4), kv.awaited_hash(other, 4)) == (second, None)
    assert woken == [first]
    assert kv.allocate(leader, 6)
    compute(kv, leader, 6)
    assert find_prefix(kv, follower) == 8
    assert kv.awaited_hash(follower, 8) is None
    assert woken == [first, second]


def test_nobody_waits_for_a_leader_that_has_gone() -> None:
    kv = manager()
    leader, follower = request(PROMPT, 0), request(PROMPT, 1)
    woken: list[bytes] = []
    kv.wake_followers = woken.append
    assert find_prefix(kv, leader) == 0
    assert kv.admit(leader, 0, 4)
    compute(kv, leader, 4)
    kv.free(leader)
    assert woken == leader.block_hashes
    assert find_prefix(kv, follower) == 4
    assert kv.awaited_hash(follower, 4) is None
    kv.check_integrity([])


def test_an_admission_that_does_not_fit_changes_nothing() -> None:
    kv = manager(4)
    first = request(PROMPT[:8], 0)
    admit(kv, first)
    second = request([*PROMPT, 11, 12, 13], 1)
    assert find_prefix(kv, second) == 8
    assert not kv.admit(second, 8, 5)
    assert (second.block_tables, second.num_computed_tokens, kv.num_free_blocks) == ([], 0, 1)
    kv.check_integrity([first])


def test_held_blocks_of_a_prefix_cost_no_free_block() -> None:
    kv = manager()
    first, later = request(PROMPT, 0), request(PROMPT, 1)
    admit(kv, first)
    assert kv.num_held_blocks(later, find_prefix(kv, later)) == 2
    kv.free(first)
    assert kv.num_held_blocks(later, find_prefix(kv, later)) == 0


def test_allocate_fills_the_last_block_before_it_takes_another() -> None:
    kv = manager(5)
    r = request(PROMPT, 0)
    admit(kv, r)
    assert kv.num_available_tokens(r) == 6
    assert kv.allocate(r, 2)
    assert tables(r) == [[1, 2, 3]]
    assert kv.allocate(r, 3)
    assert tables(r) == [[1, 2, 3, 4]]
    assert not kv.allocate(r, 7)
    assert tables(r) == [[1, 2, 3, 4]]


def test_fork_shares_whole_blocks_and_copies_the_partial_one_on_write() -> None:
    kv = manager()
    parent, child = request(PROMPT, 0), request(PROMPT, 1)
    admit(kv, parent)
    kv.take_step_blocks()
    kv.fork(parent, child)
    assert tables(child) == [[1, 2, 3]]
    assert child.num_computed_tokens == 9
    assert [kv.pools[0].references(block) for block in (1, 2, 3)] == [2, 2, 2]
    assert kv.allocate(child, 1)
    assert tables(child) == [[1, 2, 4]]
    assert kv.take_step_blocks().copies == [{4: 3}]
    assert kv.allocate(parent, 1)  # the parent is alone on its block again
    assert tables(parent) == [[1, 2, 3]]
    assert kv.take_step_blocks().copies == [{}]
    kv.check_integrity([parent, child])


def test_fork_of_a_prompt_that_ends_behind_a_block_copies_nothing() -> None:
    kv = manager()
    parent, child = request(PROMPT[:9], 0), request(PROMPT[:9], 1)
    admit(kv, parent)
    kv.fork(parent, child)
    assert tables(child) == [[1, 2]]
    assert kv.allocate(child, 1)
    assert tables(child) == [[1, 2, 4]]
    assert kv.take_step_blocks().copies == [{}]


def test_a_fork_without_room_for_its_copy_leaves_no_trace() -> None:
    kv = manager(4)
    parent, child = request(PROMPT, 0), request(PROMPT, 1)
    admit(kv, parent)
    kv.fork(parent, child)
    assert not kv.allocate(child, 1)
    kv.free(child)
    kv.check_integrity([parent])
    assert kv.take_step_blocks().copies == [{}]


def test_a_sliding_window_gives_blocks_back() -> None:
    kv = manager(20, 6)
    r = request(PROMPT, 0)
    admit(kv, r)
    r.append(1)
    assert kv.allocate(r, 1)  # position 10 sees 5 to 10: block 1 holds 4 to 7, block 0 is out of sight
    assert tables(r) == [[0, 2, 3]]
    compute(kv, r, 1)
    r.append(2)
    assert kv.allocate(r, 1)
    compute(kv, r, 1)
    r.append(3)
    assert kv.allocate(r, 2)
    assert tables(r) == [[0, 2, 3, 4]]  # block 1 is free, but can still be found, so block 4 goes first
    kv.check_integrity([r])


def test_a_choice_to_come_keeps_the_window_of_the_last_prompt_token() -> None:
    """A parent that ran ahead gave back the block in which the window of its choices began."""
    kv = manager(20, 5)
    parent = request(PROMPT[:8], 0, num_choices=2)
    admit(kv, parent)
    parent.num_placeholders = 1
    assert kv.allocate(parent, 1)
    assert tables(parent) == [[1, 2, 3]]
    parent.pending_indices = []
    assert kv.allocate(parent, 1)
    assert tables(parent) == [[0, 2, 3]]


def test_under_a_window_a_prefix_is_found_by_its_end() -> None:
    kv = manager(20, 5)
    first = request(range(16), 0)
    admit(kv, first)
    kv.free(first)
    kv.pools[0].unindex(1)  # the first block has been evicted
    later = request(range(17), 1)
    assert find_prefix(kv, later) == 16
    assert kv.admit(later, 16, 1)
    assert tables(later) == [[0, 0, 0, 4, 5]]
    kv.pools[0].unindex(4)
    assert find_prefix(kv, request(range(17), 2)) == 12


def test_tokens_need_no_blocks_of_the_spans_before_theirs() -> None:
    kv = KVCacheManager(20, 4, (PagedKV(1, 8), PagedKV(1, 8, span=8)))
    first = request(range(16), 0)
    admit(kv, first)
    assert tables(first) == [[1, 2, 3, 4], [1, 2, 3, 4]]
    first.append(1)
    assert kv.allocate(first, 1)  # position 16 begins a span
    assert tables(first) == [[1, 2, 3, 4, 5], [0, 0, 0, 0, 5]]
    for block in (1, 2, 4):
        kv.pools[1].unindex(block)
    assert find_prefix(kv, request(range(17), 1)) == 16
    second = request([*range(12), 50], 2)
    assert find_prefix(kv, second) == 12
    assert kv.admit(second, 12, 1)
    assert tables(second)[1][:3] == [0, 0, 3]
    kv.check_integrity([first, second])
    kv.pools[1].unindex(3)
    assert find_prefix(kv, request([*range(12), 51], 3)) == 8


def test_groups_have_tables_of_their_own_and_must_agree_on_a_prefix() -> None:
    kv = manager(20, None, 5)
    first = request(range(16), 0)
    admit(kv, first)
    assert tables(first) == [[1, 2, 3, 4], [1, 2, 3, 4]]
    first.append(1)
    assert kv.allocate(first, 1)
    assert tables(first) == [[1, 2, 3, 4, 5], [0, 0, 0, 4, 5]]
    kv.pools[0].unindex(3)
    assert find_prefix(kv, request(range(17), 1)) == 8
    kv.check_integrity([first])


def test_a_failed_step_is_forgotten() -> None:
    kv = manager()
    first = request(PROMPT, 0)
    admit(kv, first)
    kv.take_step_blocks()
    second = request([*PROMPT[:4], *range(40, 50)], 1)
    assert admit(kv, second) == 4
    failed = kv.take_step_blocks()
    kv.free(second)
    kv.fail_steps([failed])
    assert find_prefix(kv, request([*PROMPT[:4], *range(40, 50)], 2)) == 4
    assert find_prefix(kv, request(PROMPT, 3)) == 8


def test_what_ends_in_a_failed_step_is_forgotten_though_indexed_later() -> None:
    """A block whose last id was a placeholder when its step was launched is indexed only when the request ends."""
    kv = manager()
    r = request(PROMPT[:7], 0)
    admit(kv, r)
    kv.take_step_blocks()
    r.num_placeholders = 1
    assert kv.allocate(r, 1)
    compute(kv, r, 1)
    failed = kv.take_step_blocks()
    r.num_placeholders = 0
    r.append(7)
    kv.index_computed_blocks(r)
    kv.free(r)
    kv.fail_steps([failed])
    assert find_prefix(kv, request(PROMPT, 1)) == 4


def manager_of_states(num_states: int = 6, least_stop: int = 8) -> KVCacheManager:
    """A state beside keys and values, the state first. It is kept after 8, 16, 32... tokens, and at ends of prompts."""
    specs = (StateSpec((8,), torch.float32), *paged_specs(None))
    return KVCacheManager(20, 4, specs, num_states=num_states, least_stop=least_stop)


def admit_to_stop(kv: KVCacheManager, r: Request) -> tuple[int, int]:
    """Admit a request and compute its first chunk; returns how many tokens were cached, and how many it has then."""
    num_cached = find_prefix(kv, r)
    kv.plan_stops(r, num_cached)
    assert kv.admit(r, num_cached, kv.num_tokens_before_stop(r, num_cached, r.num_tokens - num_cached))
    r.num_computed_tokens += kv.num_tokens_before_stop(r, num_cached, r.num_tokens - num_cached)
    return num_cached, r.num_computed_tokens


def go_on(kv: KVCacheManager, r: Request) -> int:
    """Compute the next chunk; returns how many tokens the request has then."""
    chunk = kv.num_tokens_before_stop(r, r.num_computed_tokens, r.num_new_tokens)
    assert kv.allocate(r, chunk)
    r.num_computed_tokens += chunk
    return r.num_computed_tokens


def test_a_request_has_one_state_however_long_it_is() -> None:
    kv = manager_of_states(least_stop=100)
    first, second = request(PROMPT, 0), request(PROMPT, 1)
    assert (admit(kv, first), admit(kv, second)) == (0, 0)  # too short to keep a state
    assert tables(first) == [[1], [1, 2, 3]]
    assert tables(second) == [[2], [4, 5, 6]]
    assert (kv.num_free_blocks, kv.num_available_tokens(first)) == (13, 16 * 4 - 10)
    first.token_ids += range(70, 82)
    assert kv.allocate(first, 12)
    assert tables(first) == [[1], [1, 2, 3, 7, 8, 9]]
    kv.free(first)
    kv.check_integrity([second])
    assert find_prefix(kv, request(PROMPT, 2)) == 0


def test_a_chunk_ends_where_a_state_is_kept_and_later_requests_begin_there() -> None:
    kv = manager_of_states()
    first, later = request(range(30), 0), request([*range(20), 70, 71], 1)
    assert [admit_to_stop(kv, first)[1], *(go_on(kv, first) for _ in range(3))] == [8, 16, 28, 30]
    assert tables(first)[0] == [4]  # a copy for each stop, since a kept state never changes
    assert [kv.pools[0].is_indexed(state) for state in (1, 2, 3, 4)] == [True, True, True, False]
    assert find_prefix(kv, request(range(30), 2)) == 28
    kv.take_step_blocks()
    assert admit_to_stop(kv, later) == (16, 22)  # keys and values of 20 tokens are there, but no state behind them
    assert kv.take_step_blocks().copies[0] == {5: 2}
    kv.check_integrity([first, later])


def test_the_second_request_that_parts_from_a_prompt_keeps_the_state_there() -> None:
    kv = manager_of_states()
    requests = [request([*range(28), *([70 + number] * 8)], number) for number in range(3)]
    assert admit_to_stop(kv, requests[0]) == (0, 8)
    while requests[0].num_new_tokens:
        go_on(kv, requests[0])
    assert admit_to_stop(kv, requests[1]) == (16, 28)
    assert go_on(kv, requests[1]) == 32
    assert admit_to_stop(kv, requests[2])[0] == 28
    kv.check_integrity(requests)


def test_followers_wait_for_a_state_that_the_leader_keeps_for_them() -> None:
    kv = manager_of_states()
    leader, follower, early = request(range(40), 0), request([*range(28), 70], 1), request([*range(7), 70], 2)
    woken: list[bytes] = []
    kv.wake_followers = woken.append
    assert admit_to_stop(kv, leader) == (0, 8)
    assert find_prefix(kv, follower) == find_prefix(kv, early) == 0
    assert kv.awaited_hash(early, 0) is None  # 4 tokens are not worth a stop
    assert kv.awaited_hash(follower, 0) == leader.block_hashes[6]
    assert [go_on(kv, leader), go_on(kv, leader)] == [16, 28]
    assert leader.block_hashes[6] not in woken
    assert find_prefix(kv, follower) == 16  # the step that computes the state is not launched yet
    assert go_on(kv, leader) == 32
    assert leader.block_hashes[6] in woken
    assert find_prefix(kv, follower) == 28
    assert kv.awaited_hash(follower, 28) is None
    later = request([*range(28), 71], 3)
    kv.pools[0].unindex(next(b for b in range(1, 7) if kv.pools[0]._hashes[b] == leader.block_hashes[6]))
    assert find_prefix(kv, later) == 16
    assert kv.awaited_hash(later, 16) is None  # the leader is beyond it
    kv.check_integrity([leader])


def test_nobody_waits_for_a_state_of_a_request_that_has_gone() -> None:
    kv = manager_of_states()
    leader, follower = request(range(40), 0), request([*range(28), 70], 1)
    woken: list[bytes] = []
    kv.wake_followers = woken.append
    admit_to_stop(kv, leader)
    find_prefix(kv, follower)
    awaited = kv.awaited_hash(follower, 0)
    kv.free(leader)
    assert awaited in woken
    assert find_prefix(kv, follower) == 8  # it had come to a stop
    assert kv.awaited_hash(follower, 8) is None
    kv.check_integrity([])


def test_a_kept_state_is_given_up_where_there_is_no_room_for_a_copy() -> None:
    kv = manager_of_states(num_states=1)
    r = request(range(30), 0)
    assert [admit_to_stop(kv, r)[1], go_on(kv, r)] == [8, 16]
    assert tables(r)[0] == [1] and kv.take_step_blocks().copies[0] == {}
    kv.free(r)
    assert find_prefix(kv, request(range(30), 1)) == 16


def test_the_state_before_drafts_is_kept_until_they_are_verified() -> None:
    kv = manager_of_states(num_states=2)
    r = request(PROMPT, 0)
    admit(kv, r)
    r.append(70)
    for num_tokens, expected in [(14, (14, [2])), (12, (10, [2]))]:  # all are right; then two of three are refused
        assert kv.allocate(r, 4)
        r.num_computed_tokens += 4
        assert r.states_before_drafts and kv.pools[0].num_free == 0
        kv.check_integrity([r])
        kv.accept(r, 10, num_tokens)
        assert (r.num_computed_tokens, tables(r)[0]) == expected and kv.pools[0].num_free == 1
        r.num_computed_tokens = 10
    assert kv.take_step_blocks().copies[0] == {2: 1, 1: 1}


def test_without_a_second_state_there_are_no_drafts() -> None:
    kv = manager_of_states(num_states=1)
    r = request(PROMPT, 0)
    admit(kv, r)
    r.append(70)
    assert not kv.allocate(r, 4)
    assert kv.num_available_tokens(r) == 1
    assert kv.allocate(r, 1) and not r.states_before_drafts


def test_a_fork_copies_a_state_where_it_is_and_none_that_is_beyond() -> None:
    kv = manager_of_states()
    parent, beyond, at = request(PROMPT, 0), request(PROMPT, 1), request([*PROMPT, 70], 2)
    admit(kv, parent)
    kv.fork(parent, beyond)
    assert (beyond.num_computed_tokens, tables(beyond)) == (0, [[], []])
    kv.fork(parent, at)
    assert (at.num_computed_tokens, tables(at)) == (10, [[1], [1, 2, 3]])
    parent.append(71)
    assert kv.allocate(at, 1) and kv.allocate(parent, 1)
    assert (tables(parent), tables(at)) == ([[1], [1, 2, 3]], [[2], [1, 2, 4]])
    assert kv.take_step_blocks().copies == [{2: 1}, {4: 3}]
    kv.check_integrity([parent, at])


def test_a_prompt_with_pending_choices_stops_before_its_last_token() -> None:
    kv = manager_of_states(least_stop=100)
    parent = request(PROMPT, 0)
    assert kv.num_tokens_before_stop(parent, 0, 10) == 10
    parent.pending_indices = [1, 2]
    assert [kv.num_tokens_before_stop(parent, 0, n) for n in (4, 9, 10)] == [4, 9, 9]
    assert not kv.must_fork(parent)
    parent.num_computed_tokens = 9
    assert kv.must_fork(parent) and kv.num_tokens_before_stop(parent, 9, 1) == 1
    shortest = request([5], 1)
    shortest.pending_indices = [1]
    assert kv.num_tokens_before_stop(shortest, 0, 1) == 1 and not kv.must_fork(shortest)
    plain = manager()
    assert plain.num_tokens_before_stop(parent, 9, 10) == 10 and not plain.must_fork(parent)


def test_states_of_a_failed_step_are_forgotten_with_its_blocks() -> None:
    kv = manager_of_states()
    r = request(range(30), 0)
    admit_to_stop(kv, r)
    kv.take_step_blocks()
    go_on(kv, r)
    launched = kv.take_step_blocks()
    kv.free(r)
    assert find_prefix(kv, request(range(30), 1)) == 16
    kv.fail_steps([launched])
    assert find_prefix(kv, request(range(30), 2)) == 0
    assert [kv.pools[0].is_indexed(state) for state in range(1, 7)] == [False] * 6


def test_a_copy_that_is_copied_before_it_is_made_has_the_first_source() -> None:
    kv = manager_of_states()
    parent, child, grandchild = request(PROMPT, 0), request([*PROMPT, 70], 1), request([*PROMPT, 71], 2)
    admit(kv, parent)
    kv.take_step_blocks()
    kv.fork(parent, child)
    assert kv.allocate(child, 1)
    kv.fork(child, grandchild)
    assert kv.allocate(grandchild, 1)
    assert tables(grandchild) == [[3], [1, 2, 5]]
    assert kv.take_step_blocks().copies == [{2: 1, 3: 1}, {4: 3, 5: 3}]
    kv.check_integrity([parent, child, grandchild])
