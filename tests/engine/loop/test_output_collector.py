import logging

import pytest

from tests.engine.paged import paged_specs
from tests.engine.requests_for_tests import find_prefix, request
from weft.engine.batch import StepResult
from weft.engine.cache.manager import KVCacheManager
from weft.engine.drafts import PredictionDrafter
from weft.engine.loop.output_collector import collect, end, fail
from weft.engine.request import Request, RequestStatus
from weft.engine.schedule.scheduler import ScheduledStep, Scheduler
from weft.engine.schedule.step_cost import StepCostModel
from weft.engine.wire.messages import FinishReason, ReasoningBudget, RequestOutput, TokenLogprobs, TokensOutput


def start(*requests: Request, num_blocks: int = 50, max_num_tokens: int = 100, max_num_seqs: int = 8) -> Scheduler:
    scheduler = Scheduler(
        KVCacheManager(num_blocks, 4, paged_specs(None)),
        StepCostModel(),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_tokens,
        itl_target_s=10.0,
    )
    for r in requests:
        scheduler.add(r)
    return scheduler


def schedule(scheduler: Scheduler) -> ScheduledStep:
    step = scheduler.schedule()
    assert step is not None
    return step


def run(scheduler: Scheduler, *token_ids: int) -> list[RequestOutput]:
    """One step in which the rows sample token_ids."""
    step = schedule(scheduler)
    assert step.num_rows == len(token_ids)
    outputs = [output for _, output in collect(scheduler, step, StepResult(list(token_ids), {}, []))]
    scheduler.check_integrity()
    return outputs


def test_a_sampled_id_becomes_output_of_its_connection() -> None:
    scheduler = start(request([1, 2, 3], 5))
    step = schedule(scheduler)
    ((connection, output),) = collect(scheduler, step, StepResult([9], {}, []))
    assert (connection, output.request_id, output.index) == (0, 5, 0)
    assert (output.token_ids, output.finish_reason, output.num_cached_tokens) == ([9], None, 0)
    assert output.queue_time_s is not None
    assert run(scheduler, 8) == [TokensOutput(5, 0, [8])]
    assert scheduler.counters.generation_tokens == 2


def test_a_prefill_chunk_brings_nothing() -> None:
    scheduler = start(request(range(10), 0), max_num_tokens=6)
    assert run(scheduler) == []
    assert [o.token_ids for o in run(scheduler, 9)] == [[9]]


def test_nothing_left_to_sample_ends_the_request_instead_of_a_banned_id() -> None:
    """The sampler yields the lowest id when all are banned, and that was taken for output."""
    r = request([1], 0, allowed_token_ids=(5, 6), bad_words_token_ids=((5, 5), (5, 6)), ignore_eos=True)
    scheduler = start(r)
    assert [o.finish_reason for o in run(scheduler, 6)] == [None]
    assert [o.finish_reason for o in run(scheduler, 5)] == [None]
    (output,) = run(scheduler, 0)
    assert (output.token_ids, output.finish_reason) == ([], FinishReason.DEAD_END)
    assert output.message == "no token is left that the parameters of the request allow"


def test_nothing_is_left_under_a_budget_for_reasoning_either_until_it_is_used_up() -> None:
    """With a budget, however large, the lowest id was taken for output."""
    for budget, reason in ((3, FinishReason.DEAD_END), (2, None)):
        r = request(
            [1],
            allowed_token_ids=(5, 6),
            bad_words_token_ids=((5, 5), (5, 6)),
            reasoning_budget=ReasoningBudget(budget, 0),
        )
        scheduler = start(r)
        run(scheduler, 6)
        run(scheduler, 5)
        (output,) = run(scheduler, 0)
        assert (output.token_ids, output.finish_reason) == ([] if reason else [0], reason)


def test_what_fails_for_one_request_ends_that_one_alone(caplog: pytest.LogCaptureFixture) -> None:
    """It failed the step, and with it every request that shared it."""

    class Broken:
        def accept(self, token_id: int) -> str | None:
            raise KeyError(token_id)

    caplog.set_level(logging.CRITICAL)
    broken, sound = request([1, 2, 3], 0), request([4], 1)
    scheduler = start(broken, sound)
    step = schedule(scheduler)
    broken.grammar = Broken()  # type: ignore[assignment]
    outputs = [output for _, output in collect(scheduler, step, StepResult([8, 9], {}, []))]
    scheduler.check_integrity()
    assert outputs[0] == TokensOutput(0, 0, [], FinishReason.ERROR, message="the request failed: KeyError")
    assert (outputs[-1].request_id, outputs[-1].token_ids) == (1, [9])
    assert broken.is_finished and not sound.is_finished


@pytest.mark.parametrize("stops", [{"stop_token_ids": (9,)}, {"eos_token_ids": (9, 10)}])
def test_a_stop_id_ends_the_output_and_is_its_last_id(stops: dict[str, tuple[int, ...]]) -> None:
    scheduler = start(request([1, 2], 0, **stops))  # type: ignore[arg-type]
    run(scheduler, 8)
    (output,) = run(scheduler, 9)
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([9], FinishReason.STOP, 9)
    assert not scheduler.has_requests


def test_ignored_and_early_stop_ids_end_nothing() -> None:
    scheduler = start(request([1, 2], 0, eos_token_ids=(9,), ignore_eos=True))
    assert run(scheduler, 9)[0].finish_reason is None
    scheduler = start(request([1, 2], 0, stop_token_ids=(9,), min_tokens=1))
    assert run(scheduler, 9)[0].finish_reason is None
    assert run(scheduler, 9)[0].finish_reason is FinishReason.STOP


def test_length_ends_the_output() -> None:
    scheduler = start(request([1, 2], 0, max_tokens=2), request([3, 4], 1, max_tokens=None, max_model_len=3))
    outputs = run(scheduler, 8, 9)
    assert [o.finish_reason for o in outputs] == [None, FinishReason.LENGTH]
    assert [o.finish_reason for o in run(scheduler, 8)] == [FinishReason.LENGTH]


def test_a_stop_id_as_the_last_id_allowed_is_a_stop() -> None:
    assert run(start(request([1], 0, max_tokens=1, stop_token_ids=(9,))), 9)[0].finish_reason is FinishReason.STOP


def test_max_tokens_0_ends_with_the_last_chunk_of_the_prompt() -> None:
    scheduler = start(request(range(10), 0, max_tokens=0), max_num_tokens=6)
    assert run(scheduler) == []
    (output,) = run(scheduler)
    assert (output.token_ids, output.finish_reason, output.num_cached_tokens) == ([], FinishReason.LENGTH, 0)
    assert not scheduler.has_requests


def test_a_prompt_to_be_scored_alone_is_scored_to_its_end_when_steps_overlap() -> None:
    """The first chunk was collected when the second was already counted as computed, and ended the request."""
    scheduler = start(request([10, 11, 12, 13], 0, max_tokens=0, prompt_logprobs=0), max_num_tokens=2)
    first, second = schedule(scheduler), schedule(scheduler)
    scores = [TokenLogprobs(float(n), [], []) for n in range(3)]
    ((_, early),) = collect(scheduler, first, StepResult([], {}, scores[:2]))
    assert (early.finish_reason, early.prompt_logprobs) == (None, scores[:2])
    ((_, late),) = collect(scheduler, second, StepResult([], {}, scores[2:]))
    assert (late.finish_reason, late.prompt_logprobs) == (FinishReason.LENGTH, scores[2:])


def test_logprobs_belong_to_their_rows() -> None:
    scheduler = start(request([1], 0), request([2], 1, logprobs=1), request([3], 2, logprobs=0))
    step = schedule(scheduler)
    rows = {1: TokenLogprobs(-0.5, [4], [-0.1]), 2: TokenLogprobs(-0.25, [], [])}
    outputs = [o.logprobs for _, o in collect(scheduler, step, StepResult([7, 8, 9], rows, []))]
    assert outputs == [None, [rows[1]], [rows[2]]]


# --- drafts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "gained"),
    [([5, 6, 7, 8], [5, 6, 7, 8]), ([5, 6, 9, 8], [5, 6, 9]), ([5, 9, 7, 8], [5, 9]), ([9, 6, 7, 8], [9])],
)
def test_drafts_are_accepted_up_to_the_first_refused_one(sampled: list[int], gained: list[int]) -> None:
    r = request([1, 2, 3], 0)
    scheduler = start(r)
    run(scheduler, 4)
    r.draft_token_ids = [5, 6, 7]
    (output,) = run(scheduler, *sampled)
    assert output.token_ids == gained
    assert r.token_ids == [1, 2, 3, 4, *gained]
    assert r.num_computed_tokens == 3 + len(gained)  # all but the last id, which nobody has read yet
    assert (r.num_placeholders, r.draft_token_ids) == (0, [])
    step = schedule(scheduler)
    assert [(s.start, s.num_tokens) for s in step.requests] == [(3 + len(gained), 1)]


@pytest.mark.parametrize(
    ("sampled", "counts"), [([5, 6, 7, 8], (2, 1)), ([5, 9, 9, 9], (1, 2)), ([9] * 4, (0, 3)), ([5, 6, 9, 9], (2, 1))]
)
def test_ids_of_a_prediction_count_as_accepted_only_as_part_of_the_output(
    sampled: list[int], counts: tuple[int, int]
) -> None:
    """6 is a stop id: what was right behind it is not part of the output."""
    r = request([1, 2, 3], 0, stop_token_ids=(6,))
    scheduler = start(r)
    run(scheduler, 4)
    r.draft_token_ids = [5, 6, 7]
    r.drafting.drafter = PredictionDrafter()
    (output,) = run(scheduler, *sampled)
    assert (output.num_accepted_predictions, output.num_rejected_predictions) == counts
    counters = scheduler.counters
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (1, 3, counts[0])


def test_refused_drafts_are_not_indexed() -> None:
    r = request([1, 2], 0)
    scheduler = start(r)
    run(scheduler, 3)
    r.draft_token_ids = [4, 5]
    step = schedule(scheduler)
    assert scheduler.kv.pools[0].num_indexed == 0
    collect(scheduler, step, StepResult([9, 5, 6], {}, []))
    run(scheduler, 7)
    for token_ids, num_found in (([1, 2, 3, 4, 5], 0), ([1, 2, 3, 9, 5], 4)):
        assert find_prefix(scheduler.kv, request(token_ids, 1)) == num_found


def test_a_stop_id_among_the_drafts_ends_the_output_there() -> None:
    r = request([1, 2], 0, stop_token_ids=(6,))
    scheduler = start(r)
    run(scheduler, 4)
    r.draft_token_ids = [5, 6, 7]
    (output,) = run(scheduler, 5, 6, 7, 8)
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([5, 6], FinishReason.STOP, 6)


def test_drafts_never_exceed_the_length() -> None:
    r = request([1, 2], 0, max_tokens=3)
    scheduler = start(r)
    run(scheduler, 4)
    r.draft_token_ids = [5]
    (output,) = run(scheduler, 5, 6)
    assert (output.token_ids, output.finish_reason) == ([5, 6], FinishReason.LENGTH)


# --- choices -----------------------------------------------------------------------------------------------------


def test_choices_start_with_the_first_id_of_their_parent() -> None:
    scheduler = start(request([1, 2, 3, 4, 5], 0, num_choices=3))
    assert [(o.index, o.token_ids) for o in run(scheduler, 9)] == [(0, [9])]
    outputs = run(scheduler, 10, 11, 12)
    assert [(o.index, o.token_ids, o.num_cached_tokens) for o in outputs] == [
        (0, [10], None),
        (1, [11], 0),
        (2, [12], 0),
    ]
    assert scheduler.kv.pools[0].num_used == 4  # one shared block and a copy of the partial one each


def test_choices_outlive_a_parent_that_ends_with_its_first_id() -> None:
    scheduler = start(request([1, 2, 3, 4, 5], 0, num_choices=2, max_tokens=1))
    assert [o.finish_reason for o in run(scheduler, 9)] == [FinishReason.LENGTH]
    (output,) = run(scheduler, 10)
    assert (output.index, output.token_ids, output.finish_reason) == (1, [10], FinishReason.LENGTH)
    assert scheduler.kv.pools[0].num_used == 0


def test_choices_without_output_all_end() -> None:
    scheduler = start(request([1, 2, 3], 0, num_choices=2, max_tokens=0))
    outputs = run(scheduler) + run(scheduler)
    assert [(o.index, o.finish_reason) for o in outputs] == [(0, FinishReason.LENGTH), (1, FinishReason.LENGTH)]


# --- ends --------------------------------------------------------------------------------------------------------


def test_end_speaks_for_pending_choices_too() -> None:
    r = request([1], 4, num_choices=3)
    scheduler = start(r)
    outputs = end(scheduler, r, FinishReason.TIMEOUT, "late")
    assert [(c, o.request_id, o.index, o.finish_reason, o.message) for c, o in outputs] == [
        (0, 4, index, FinishReason.TIMEOUT, "late") for index in range(3)
    ]
    assert r.status is RequestStatus.FINISHED


def test_fail_ends_the_requests_of_the_steps_and_nothing_they_computed_is_found() -> None:
    scheduler = start(request(range(9), 0), request(range(20, 24), 1, priority=1), max_num_tokens=9)
    step = schedule(scheduler)
    outputs = fail(scheduler, [step], "broken")
    assert [(o.request_id, o.finish_reason, o.message) for _, o in outputs] == [(0, FinishReason.ERROR, "broken")]
    assert [key.request_id for key in scheduler.requests] == [1]
    assert find_prefix(scheduler.kv, request(range(9), 2)) == 0
    scheduler.check_integrity()


def test_fail_forgets_a_block_that_was_indexed_because_its_request_ended() -> None:
    """The block's last id was sampled by a good step, but its K/V was to be computed by the failed one."""
    scheduler = start(request([1, 2, 3], 0, max_tokens=2))
    first, second = schedule(scheduler), schedule(scheduler)
    collect(scheduler, first, StepResult([4], {}, []))
    assert scheduler.schedule() is None
    fail(scheduler, [second], "broken")
    assert find_prefix(scheduler.kv, request([1, 2, 3, 4, 5], 1)) == 0
