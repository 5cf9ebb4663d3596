"""Block size 4 throughout; a step is described by the request ids and the tokens that each computes."""

import time

import pytest

from tests.engine.fake_runner import make_engine
from tests.engine.paged import paged_specs
from tests.engine.requests_for_tests import PerToken, add_request, request
from weft.engine.batch import StepResult
from weft.engine.cache.manager import KVCacheManager
from weft.engine.loop.output_collector import collect
from weft.engine.request import Outputs, Request, RequestStatus
from weft.engine.schedule.scheduler import ScheduledStep, Scheduler
from weft.engine.schedule.step_cost import StepCostModel
from weft.engine.wire.messages import TIER_WIDTH, FinishReason, ReasoningBudget
from weft.engine.wire.params import BACKGROUND


class Careless(Scheduler):
    """Admits whatever fits now, so that blocks run out."""

    def _expected_growth(self, request: Request) -> int:
        return 0


def make_scheduler(
    kind: type[Scheduler] = Scheduler,
    *,
    num_blocks: int = 1000,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 100,
    target_s: float | None = 10.0,
    cost: StepCostModel | None = None,
) -> Scheduler:
    return kind(
        KVCacheManager(num_blocks, 4, paged_specs(None)),
        cost or StepCostModel(),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        itl_target_s=target_s,
    )


def prompt(request_id: int, num_tokens: int) -> list[int]:
    """A prompt that shares no prefix with another."""
    return [request_id + 1000] * num_tokens


def add(scheduler: Scheduler, request_id: int, num_tokens: int, **options: object) -> Request:
    added = request(prompt(request_id, num_tokens), request_id, max_model_len=100_000, **options)  # type: ignore[arg-type]
    scheduler.add(added)
    return added


def schedule(scheduler: Scheduler) -> ScheduledStep:
    step = scheduler.schedule()
    assert step is not None
    scheduler.check_integrity()
    return step


def describe(step: ScheduledStep) -> list[tuple[int, int]]:
    return [(s.request.key.request_id, s.num_tokens) for s in step.requests]


def finish_step(scheduler: Scheduler, step: ScheduledStep) -> Outputs:
    outputs = collect(scheduler, step, StepResult([7] * step.num_rows, {}, []))
    scheduler.check_integrity()
    return outputs


def run_step(scheduler: Scheduler) -> list[tuple[int, int]]:
    step = schedule(scheduler)
    finish_step(scheduler, step)
    return describe(step)


# --- who computes what --------------------------------------------------------------------------------------------


def test_nothing_to_do_is_no_step() -> None:
    assert make_scheduler().schedule() is None


def test_decodes_are_served_before_prefill_takes_the_rest() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20)
    add(scheduler, 0, 4)
    add(scheduler, 1, 3)
    assert run_step(scheduler) == [(0, 4), (1, 3)]
    add(scheduler, 2, 50)
    assert run_step(scheduler) == [(0, 1), (1, 1), (2, 18)]
    assert run_step(scheduler) == [(0, 1), (1, 1), (2, 18)]
    assert run_step(scheduler) == [(0, 1), (1, 1), (2, 14)]
    assert run_step(scheduler) == [(0, 1), (1, 1), (2, 1)]


def test_a_decode_is_served_though_an_older_prefill_would_take_everything() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20)
    add(scheduler, 0, 50, priority=1)
    add(scheduler, 1, 4)
    assert run_step(scheduler) == [(1, 4), (0, 16)]
    add(scheduler, 2, 8, priority=2)
    assert dict(run_step(scheduler))[1] == 1


def test_several_partial_prefills_share_a_step_and_a_short_prompt_overtakes_a_long_one() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=40)
    add(scheduler, 0, 400)
    assert run_step(scheduler) == [(0, 40)]
    add(scheduler, 1, 18)
    assert run_step(scheduler) == [(0, 30), (1, 10)]
    assert run_step(scheduler) == [(1, 8), (0, 32)]
    assert run_step(scheduler) == [(0, 39), (1, 1)]


def test_a_decode_limits_prefill_to_the_target() -> None:
    scheduler = make_scheduler(cost=PerToken(), target_s=0.030)
    add(scheduler, 0, 90)
    assert run_step(scheduler) == [(0, 90)]  # nothing decodes: only tokens count
    add(scheduler, 1, 100)
    assert run_step(scheduler) == [(0, 1), (1, 29)]


def test_a_stream_whose_ids_are_on_their_way_limits_prefill_as_well() -> None:
    """With a step in flight it is not scheduled, so prompts were given a whole step, however long that took."""
    scheduler = make_scheduler(cost=PerToken(), target_s=0.030)
    stream = add(scheduler, 0, 4)
    stream.reasoning_budget = ReasoningBudget(10, 3)
    run_step(scheduler)
    in_flight = schedule(scheduler)
    add(scheduler, 1, 90)
    assert describe(schedule(scheduler)) == [(1, 30)]
    finish_step(scheduler, in_flight)


@pytest.mark.parametrize(("num_blocks", "granted"), [(1000, 40), (30, 4)])
def test_prompts_go_first_only_while_there_is_room_for_as_many_as_decode(num_blocks: int, granted: int) -> None:
    scheduler = make_scheduler(num_blocks=num_blocks, target_s=None, cost=PerToken())
    for request_id in range(3):
        add(scheduler, request_id, 8, max_tokens=8)
    run_step(scheduler)
    run_step(scheduler)  # without prompts, or those that come would belong to the same burst
    for request_id in range(3, 8):
        add(scheduler, request_id, 40, max_tokens=4)
    assert run_step(scheduler)[:4] == [(0, 1), (1, 1), (2, 1), (3, granted)]


def test_prefill_gets_a_block_though_decodes_alone_miss_the_target() -> None:
    scheduler = make_scheduler(cost=PerToken(), target_s=0.002)
    for request_id in range(4):
        add(scheduler, request_id, 2)
    run_step(scheduler)
    add(scheduler, 4, 10)
    add(scheduler, 5, 10)
    decodes = [(request_id, 1) for request_id in range(4)]
    assert run_step(scheduler) == [*decodes, (4, 4)]
    assert run_step(scheduler) == [*decodes, (4, 4)]
    assert run_step(scheduler) == [*decodes, (4, 2)]
    assert run_step(scheduler) == [*decodes, (4, 1), (5, 4)]


def test_drafts_leave_a_block_of_the_budget_to_prefill() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=12)
    first, second = add(scheduler, 0, 2), add(scheduler, 1, 2)
    run_step(scheduler)
    first.draft_token_ids, second.draft_token_ids = [1] * 5, [2] * 5
    add(scheduler, 2, 20)
    step = schedule(scheduler)
    assert describe(step) == [(0, 6), (1, 2), (2, 4)]
    assert [s.draft_token_ids for s in step.requests] == [(1,) * 5, (2,), ()]


@pytest.mark.parametrize(
    ("target_s", "num_others", "num_drafts"),
    [(0.010, 0, [7, 1]), (0.010, 3, [5, 0]), (None, 0, [7, 7]), (None, 1, [4, 0]), (None, 5, [6, 0])],
)
def test_drafts_leave_time_to_those_who_have_none(
    target_s: float | None, num_others: int, num_drafts: list[int]
) -> None:
    """They were bounded by the tokens of a step alone, so that others waited for drafts as long as for a prompt."""
    scheduler = make_scheduler(target_s=target_s, cost=PerToken())
    requests = [add(scheduler, request_id, 2) for request_id in range(2 + num_others)]
    run_step(scheduler)
    for drafting in requests[:2]:
        drafting.draft_token_ids = [1] * 7
    step = schedule(scheduler)
    assert [len(s.draft_token_ids) for s in step.requests[:2]] == num_drafts
    assert step.load.num_tokens == 2 + num_others + sum(num_drafts)


def test_known_output_is_computed_in_chunks_beside_the_streams_that_run() -> None:
    """What a grammar forced was one draft of any length."""
    scheduler = make_scheduler(cost=PerToken(), target_s=0.030)
    add(scheduler, 0, 4)
    forced = add(scheduler, 1, 4, max_tokens=100)
    run_step(scheduler)
    for _ in range(60):
        forced.append(7)
    steps = [schedule(scheduler)]
    while steps[-1].requests[0].num_rows == 0:
        finish_step(scheduler, steps[-1])
        steps.append(schedule(scheduler))
    assert [describe(step) for step in steps] == [[(1, 29), (0, 1)], [(1, 29), (0, 1)], [(1, 3), (0, 1)]]
    assert [step.num_rows for step in steps] == [1, 1, 2]


def test_known_output_is_no_prompt_that_may_go_before_streams_and_gets_a_token_in_every_step() -> None:
    scheduler = make_scheduler(cost=PerToken(), target_s=None)
    requests = [add(scheduler, request_id, 4, max_tokens=100) for request_id in range(4)]
    run_step(scheduler)
    for forced in requests[1:]:
        for _ in range(60):
            forced.append(7)
    assert run_step(scheduler) == [(1, 5), (2, 1), (3, 1), (0, 1)]


def test_lower_priority_values_and_earlier_arrivals_are_admitted_first() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id, priority in enumerate([1, 0, 1, -1]):
        add(scheduler, request_id, 4, priority=priority, max_tokens=2)
    order = []
    while scheduler.has_requests:
        order += [request_id for request_id, num_tokens in run_step(scheduler) if num_tokens == 4]
    assert order == [3, 1, 0, 2]


@pytest.mark.parametrize(("tier", "longest_s"), [(0, 30), (TIER_WIDTH, 60)])
def test_a_tier_above_delays_a_request_for_a_bounded_time(
    tier: int, longest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four clients of the top tier, each of which asks again at once, starved all others for ever."""
    now_s = 1000.0
    monkeypatch.setattr("weft.engine.schedule.scheduler.time.monotonic", lambda: now_s)
    scheduler = make_scheduler(max_num_seqs=2)
    slow = add(scheduler, 0, 4, priority=tier)
    num_asked = 0
    while slow.status is RequestStatus.WAITING:
        while len(scheduler.requests) < 5:
            num_asked += 1
            add(scheduler, num_asked, 4, priority=-TIER_WIDTH, max_tokens=2)
        run_step(scheduler)
        now_s += 0.5
        assert now_s - 1000.0 <= longest_s + 3, "the four that came before its last lift are served first"
    assert now_s - 1000.0 > longest_s
    assert num_asked > 50


# --- blocks ------------------------------------------------------------------------------------------------------


def test_the_youngest_that_completed_a_block_is_preempted_and_comes_back() -> None:
    scheduler = make_scheduler(Careless, num_blocks=6)  # room for 20 tokens
    old, middle, young = (add(scheduler, i, n, max_tokens=12) for i, n in enumerate([7, 7, 3]))
    assert run_step(scheduler) == [(0, 7), (1, 7), (2, 3)]
    assert run_step(scheduler) == [(0, 1), (1, 1), (2, 1)]
    assert run_step(scheduler) == [(0, 1)]  # 2 gave its block to 0; 1 then found no younger one to take from
    assert (old.num_preemptions, middle.num_preemptions, young.num_preemptions) == (0, 1, 1)
    assert list(scheduler.waiting) == [middle, young]
    assert middle.token_ids == [*prompt(1, 7), 7, 7]
    while scheduler.has_requests:
        run_step(scheduler)
    assert old.num_preemptions == 0
    assert [r.num_output_tokens for r in (old, middle, young)] == [12, 12, 12]
    assert scheduler.counters.num_preemptions >= 2


def test_a_request_without_a_completed_block_is_spared() -> None:
    """Preempting it would gain nothing but the chance to preempt it again."""
    scheduler = make_scheduler(Careless, num_blocks=5)
    old, middle, young = add(scheduler, 0, 3), add(scheduler, 1, 7), add(scheduler, 2, 1)
    assert run_step(scheduler) == [(0, 3), (1, 7), (2, 1)]
    assert run_step(scheduler) == [(0, 1), (1, 1), (2, 1)]
    assert run_step(scheduler) == [(0, 1), (2, 1)]  # 0 needs a block; 2, the youngest, is in its first one
    assert (old.num_preemptions, middle.num_preemptions, young.num_preemptions) == (0, 1, 0)


def test_the_oldest_is_never_preempted() -> None:
    scheduler = make_scheduler(num_blocks=9)
    scheduler.mean_output_tokens = 1.0
    requests = [add(scheduler, request_id, 6, max_tokens=20) for request_id in range(4)]
    order = []
    while scheduler.has_requests:
        oldest = min(scheduler.requests.values(), key=lambda r: r.arrival)
        before = oldest.num_preemptions
        step = schedule(scheduler)
        assert oldest.num_preemptions == before
        order += [o.request_id for _, o in finish_step(scheduler, step) if o.finish_reason is FinishReason.LENGTH]
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2, 3]
    assert requests[0].num_preemptions == 0
    assert scheduler.counters.num_preemptions > 0


def test_admission_counts_the_output_that_is_to_be_expected() -> None:
    scheduler = make_scheduler(num_blocks=21)  # 80 tokens; two requests are expected to take 4 + 64 each
    add(scheduler, 0, 4, max_tokens=None)
    add(scheduler, 1, 4, max_tokens=None)
    add(scheduler, 2, 4, max_tokens=4)
    assert run_step(scheduler) == [(0, 4)]
    scheduler.mean_output_tokens = 8.0
    assert run_step(scheduler) == [(0, 1), (1, 4), (2, 4)]


def test_a_prefix_in_free_blocks_is_no_room_gained() -> None:
    """Taking cached blocks out of the free list was not counted, so admission ran into preemption."""
    scheduler = make_scheduler(num_blocks=13)
    add(scheduler, 0, 24, max_tokens=1)
    run_step(scheduler)
    assert not scheduler.has_requests
    add(scheduler, 1, 12, max_tokens=12)
    run_step(scheduler)
    scheduler.add(request(prompt(0, 24), 2, max_tokens=12))  # 20 cached tokens in 5 of the 9 free blocks
    assert run_step(scheduler) == [(1, 1)]


def test_a_long_prompt_at_the_head_is_not_passed_for_ever() -> None:
    scheduler = make_scheduler(num_blocks=11)
    scheduler.mean_output_tokens = 1.0
    add(scheduler, 0, 20, max_tokens=8)
    run_step(scheduler)
    add(scheduler, 1, 36, max_tokens=4)
    add(scheduler, 2, 4, max_tokens=4)
    assert run_step(scheduler) == [(0, 1)]
    started = []
    while scheduler.has_requests:
        started += [request_id for request_id, num_tokens in run_step(scheduler) if num_tokens > 1]
    assert started == [1, 2]


# --- alone, late, gone -------------------------------------------------------------------------------------------


def test_a_suspect_runs_alone_and_is_not_overtaken() -> None:
    """It used to wait until the engine was empty by chance, which never happens under load."""
    scheduler = make_scheduler()
    add(scheduler, 0, 4, max_tokens=2)
    suspect = add(scheduler, 1, 4, max_tokens=2)
    suspect.runs_alone = True
    add(scheduler, 2, 4, max_tokens=2)
    assert [run_step(scheduler) for _ in range(6)] == [[(0, 4)], [(0, 1)], [(1, 4)], [(1, 1)], [(2, 4)], [(2, 1)]]


def test_the_choices_of_a_suspect_run_together() -> None:
    scheduler = make_scheduler()
    suspect = add(scheduler, 0, 4, max_tokens=2, num_choices=2)
    suspect.runs_alone = True
    assert run_step(scheduler) == [(0, 4)]
    assert run_step(scheduler) == [(0, 1), (0, 1)]


def test_only_a_deadline_of_a_request_that_never_ran_expires() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    past = time.monotonic() - 1
    running = add(scheduler, 0, 4, deadline=past)
    run_step(scheduler)
    late = add(scheduler, 1, 4, deadline=past)
    add(scheduler, 2, 4, deadline=time.monotonic() + 100)
    add(scheduler, 3, 4)
    assert scheduler.waiting.take_expired(scheduler.clock()) == [late]
    assert running.status is RequestStatus.RUNNING


def test_abort_of_a_running_request_frees_its_blocks_but_keeps_their_content() -> None:
    scheduler = make_scheduler()
    add(scheduler, 0, 10)
    run_step(scheduler)
    scheduler.abort(0, 0)
    assert not scheduler.has_requests
    assert scheduler.kv.pools[0].num_used == 0
    scheduler.add(request(prompt(0, 10), 1))
    assert run_step(scheduler) == [(1, 2)]
    scheduler.abort(0, 99)
    scheduler.abort(5, 1)
    assert len(scheduler.running) == 1


def test_abort_of_one_choice_leaves_the_others() -> None:
    scheduler = make_scheduler()
    add(scheduler, 0, 6, num_choices=3)
    run_step(scheduler)
    assert sorted(key.choice for key in scheduler.requests) == [0, 1, 2]
    scheduler.abort(0, 0, 1)
    scheduler.check_integrity()
    assert sorted(key.choice for key in scheduler.requests) == [0, 2]
    scheduler.abort(0, 0)
    assert not scheduler.has_requests
    assert scheduler.kv.pools[0].num_used == 0


def test_abort_of_pending_choices_before_the_prompt_is_computed() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    first = add(scheduler, 0, 12, num_choices=4)
    run_step(scheduler)
    scheduler.abort(0, 0, 2)
    assert first.pending_indices == [1, 3]
    scheduler.abort(0, 0, 0)  # the next choice takes its place, and finds the blocks that were computed
    (second,) = scheduler.requests.values()
    assert (second.key.choice, second.pending_indices, second.status) == (1, [3], RequestStatus.WAITING)
    assert run_step(scheduler) == [(0, 4)]
    assert sorted(key.choice for key in scheduler.requests) == [1, 3]
    scheduler.abort_connection(0)
    assert not scheduler.has_requests
    assert scheduler.counters.prompt_tokens == 12


def test_a_choice_without_a_seat_waits() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, 0, 6, num_choices=3, max_tokens=2)
    assert run_step(scheduler) == [(0, 6)]
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 1)
    steps = []
    while scheduler.has_requests:
        steps.append(run_step(scheduler))
    assert steps == [[(0, 1), (0, 1)], [(0, 1), (0, 2)], [(0, 1)]]
    assert (scheduler.counters.prompt_tokens, scheduler.counters.generation_tokens) == (6, 6)
    assert (scheduler.counters.prefill_tokens, scheduler.counters.decode_tokens) == (8, 4)


# --- prefixes and overlap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_eight_requests_with_one_long_prefix_compute_it_once(overlap: bool) -> None:
    fake = make_engine(num_blocks=100, max_num_batched_tokens=32, overlap=overlap, max_model_len=200)
    prefix = [3, 1, 4, 1] * 20
    for request_id in range(8):
        fake.engine.add(0, add_request([*prefix, request_id, 40], request_id, max_tokens=1))
    while fake.engine.has_work:
        fake.step()
        fake.engine.scheduler.check_integrity()
    counters = fake.engine.scheduler.counters
    assert fake.runner.num_computed_tokens == 80 + 8 * 2
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (8 * 82, 7 * 80)
    assert (counters.prompt_tokens, counters.generation_tokens) == (8 * 82, 8)


def test_a_step_can_be_scheduled_before_the_last_one_is_collected() -> None:
    scheduler = make_scheduler()
    added = add(scheduler, 0, 5, max_tokens=3)
    steps = [schedule(scheduler), schedule(scheduler)]
    assert [s.requests[0].num_placeholders for s in steps] == [0, 1]
    assert (added.num_placeholders, added.num_computed_tokens) == (2, 6)
    assert [o.token_ids for _, o in finish_step(scheduler, steps[0])] == [[7]]
    steps.append(schedule(scheduler))
    assert scheduler.schedule() is None  # all three tokens are on their way
    finish_step(scheduler, steps[1])
    assert [o.finish_reason for _, o in finish_step(scheduler, steps[2])] == [FinishReason.LENGTH]
    assert not scheduler.has_requests


def test_what_ended_while_a_step_was_on_its_way_gets_nothing_more() -> None:
    scheduler = make_scheduler()
    add(scheduler, 0, 5, stop_token_ids=(7,))
    first, second = schedule(scheduler), schedule(scheduler)
    assert [o.finish_reason for _, o in finish_step(scheduler, first)] == [FinishReason.STOP]
    assert finish_step(scheduler, second) == []
    assert scheduler.kv.pools[0].num_used == 0


def test_a_preempted_request_keeps_the_id_that_was_on_its_way() -> None:
    scheduler = make_scheduler(Careless, num_blocks=5)
    add(scheduler, 0, 7)
    young = add(scheduler, 1, 7)
    run_step(scheduler)
    first = schedule(scheduler)
    second = schedule(scheduler)
    assert (describe(first), describe(second)) == ([(0, 1), (1, 1)], [(0, 1)])
    assert (young.status, young.num_placeholders) == (RequestStatus.WAITING, 1)
    assert scheduler.kv.num_free_blocks == 1
    assert [o.request_id for _, o in finish_step(scheduler, first)] == [0, 1]
    assert (young.token_ids, young.num_placeholders) == ([*prompt(1, 7), 7, 7], 0)


# --- background requests --------------------------------------------------------------------------------------------


def test_background_requests_compute_only_while_no_other_wants_to() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, 6, priority=BACKGROUND)
    add(scheduler, 2, 6, priority=BACKGROUND)
    assert run_step(scheduler) == [(1, 6), (2, 6)]
    other = add(scheduler, 3, 5)
    assert run_step(scheduler) == [(3, 5)]
    assert run_step(scheduler) == [(3, 1)]
    assert [r.key.request_id for r in scheduler.waiting] == [1, 2]
    scheduler.finish(other)
    assert run_step(scheduler) == [(1, 3), (2, 3)]  # their full blocks were still cached


def test_background_requests_come_last_however_long_they_wait() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    old = add(scheduler, 1, 6, priority=BACKGROUND)
    old.arrival_time -= 1e6
    scheduler.waiting.age(time.monotonic())
    add(scheduler, 2, 6, priority=TIER_WIDTH)
    assert run_step(scheduler) == [(2, 6)]
