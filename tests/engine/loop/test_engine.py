import dataclasses
import logging

import llguidance
import msgspec
import pytest
import torch

from tests.engine.fake_runner import FakeEngine, make_engine, next_id
from tests.engine.guidance.demo import guided
from tests.engine.requests_for_tests import add_request
from weft.engine.drafts import FIRST_PAUSE, Pace
from weft.engine.guidance.compiler import GrammarCompiler
from weft.engine.guidance.matcher import Forcing
from weft.engine.loop.grammars import PendingGrammars
from weft.engine.loop.pending import RejectedError
from weft.engine.request import Request
from weft.engine.schedule.speculator import Speculator
from weft.engine.schedule.step_cost import FIRST_TRIAL, StepLoad
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import (
    AddRequest,
    CachePolicy,
    FinishReason,
    Guidance,
    Pin,
    ReasoningBudget,
    RejectReason,
    RequestOutput,
)
from weft.engine.wire.options import Adapter
from weft.engine.wire.params import SamplingParams


def finish(fake: FakeEngine) -> dict[tuple[int, int], list[int]]:
    """Step until nothing is left; returns the ids of every choice."""
    ids: dict[tuple[int, int], list[int]] = {}
    while fake.engine.has_work:
        for _, output in fake.step():
            assert output.finish_reason is not FinishReason.ERROR
            ids.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    return ids


def greedy(prompt: list[int], num_tokens: int) -> list[int]:
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_id(context, 0.0, 0.0))
    return context[len(prompt) :]


def test_idle_time_goes_to_steps_first_and_to_the_vocabulary_when_it_lasts() -> None:
    loaded: list[str] = []

    def load() -> Forcing:
        loaded.append("vocabulary")
        return Forcing(llguidance.LLTokenizer("byte"))

    fake = make_engine()
    fake.runner.num_unprepared = 2
    fake.engine.pending.grammars = PendingGrammars(GrammarCompiler(load))
    assert fake.engine.prepare(0.1) == pytest.approx(0.4) and fake.runner.num_unprepared == 2
    assert fake.engine.prepare(0.5) == 0.0 and fake.runner.num_unprepared == 1
    assert fake.engine.prepare(0.6) == pytest.approx(1.4) and fake.runner.num_unprepared == 0
    assert not loaded
    assert fake.engine.prepare(2.0) is None and loaded == ["vocabulary"]


def test_idle_time_without_grammars_is_over_when_steps_are_ready() -> None:
    assert make_engine().engine.prepare(0.5) is None


@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_gets_its_own_continuation(overlap: bool) -> None:
    fake = make_engine(overlap=overlap, max_num_batched_tokens=12)
    prompts = [[1, 2, 3], [4] * 17, [5, 6]]
    for request_id, prompt in enumerate(prompts):
        fake.engine.add(0, add_request(prompt, request_id, max_tokens=9, temperature=0.0))
    assert finish(fake) == {(i, 0): greedy(prompt, 9) for i, prompt in enumerate(prompts)}


def test_steps_count_what_the_device_says_where_it_has_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = make_engine()
    plain = fake.runner.collect
    times = {"device_s": 1000.0, "drafts_device_s": 1.0}
    monkeypatch.setattr(fake.runner, "collect", lambda step: dataclasses.replace(plain(step), **times))
    fake.engine.add(0, add_request([1, 2], max_tokens=3))
    finish(fake)
    counters, decode = fake.engine.scheduler.counters, StepLoad()
    decode.add(1, 2)
    assert counters.num_steps == 3 and counters.step_seconds == 3003.0
    assert fake.engine.scheduler.cost.predict(decode) == pytest.approx(1000.0, rel=0.01)


def test_overlap_launches_a_step_before_the_last_one_is_collected() -> None:
    plain, overlapped = make_engine(), make_engine(overlap=True)
    for fake in (plain, overlapped):
        fake.engine.add(0, add_request([1, 2], max_tokens=3))
    assert [len(o.token_ids) for _, o in plain.step()] == [1]
    assert plain.engine.launched_steps == []
    assert overlapped.step() == []
    assert len(overlapped.engine.launched_steps) == 1
    assert [len(o.token_ids) for _, o in overlapped.step()] == [1]
    assert len(overlapped.runner.batches) == 2
    assert overlapped.runner.batches[1].placeholders.targets.tolist() == [0]
    finish(overlapped)
    assert (plain.engine.scheduler.counters.num_steps, overlapped.engine.scheduler.counters.num_steps) == (1, 3)


def test_drafts_change_the_number_of_steps_and_nothing_else() -> None:
    class Oracle:
        def propose(self, request: Request) -> list[int]:
            return greedy(request.token_ids, 3)

    fake = make_engine(drafter=Oracle())
    fake.engine.add(0, add_request([1, 2, 3], max_tokens=10, temperature=0.0))
    assert finish(fake) == {(0, 0): greedy([1, 2, 3], 10)}
    assert fake.engine.scheduler.counters.num_steps == 4  # 1 + 4 + 4 + 1 ids


def test_steps_are_told_before_they_are_launched() -> None:
    fake = make_engine()
    seen: list[tuple[int, int]] = []
    fake.engine._before_launch = lambda step: seen.append((step.requests[0].num_tokens, len(fake.runner.batches)))
    fake.engine.add(0, add_request([1, 2, 3], max_tokens=2))
    finish(fake)
    assert seen == [(3, 0), (1, 1)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_drafter_that_fails_is_left_out_for_a_while_and_costs_no_request_anything(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Drafts never came back, though what had failed was memory that was missing for a moment."""

    class BrokenAtFirst:
        num_asked = 0

        def propose(self, request: Request) -> list[int]:
            self.num_asked += 1
            if self.num_asked <= 2:
                raise torch.OutOfMemoryError("none left")
            return greedy(request.token_ids, 3)

    caplog.set_level(logging.ERROR)
    drafter = BrokenAtFirst()
    num_tokens = 4 * FIRST_PAUSE
    fake = make_engine(drafter=drafter, num_blocks=200, max_model_len=600, overlap=overlap)
    fake.engine.add(0, add_request([1, 2, 3], max_tokens=num_tokens, temperature=0.0))
    assert finish(fake) == {(0, 0): greedy([1, 2, 3], num_tokens)}
    assert caplog.messages == [
        f"drafting failed; the next {pause} steps go without" for pause in (FIRST_PAUSE, 2 * FIRST_PAUSE)
    ]
    assert 3 * FIRST_PAUSE < fake.engine.scheduler.counters.num_steps < 3.5 * FIRST_PAUSE
    assert max(batch.num_tokens for batch in fake.runner.batches[4:]) == 4


def test_no_request_waits_for_a_draft_model_that_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        pace = Pace()

        def price(self, step_s: float) -> float:
            return 0.0

        def propose(self, requests: list[Request], num_drafts: int) -> list[list[int]]:
            raise torch.OutOfMemoryError("none left")

    caplog.set_level(logging.CRITICAL)
    fake = make_engine(overlap=True)
    fake.engine._speculator = Speculator(fake.engine.scheduler, (), Broken())
    fake.engine.add(0, add_request([1, 2, 3], max_tokens=20, temperature=0.0))
    assert finish(fake) == {(0, 0): greedy([1, 2, 3], 20)}
    assert sum(len(batch.placeholders.targets) for batch in fake.runner.batches) > 15  # steps overlap again


def test_a_draft_model_that_fails_leaves_the_other_drafters_alone(caplog: pytest.LogCaptureFixture) -> None:
    """They paused with it, though what it lacks is memory that they need none of."""

    class Broken:
        pace = Pace()

        def price(self, step_s: float) -> float:
            return 0.0

        def propose(self, requests: list[Request], num_drafts: int) -> list[list[int]]:
            raise torch.OutOfMemoryError("none left")

    class EverySecond:
        num_asked = 0

        def propose(self, request: Request) -> list[int]:
            self.num_asked += 1
            return greedy(request.token_ids, 3) if self.num_asked % 2 else []

    caplog.set_level(logging.ERROR)
    fake = make_engine()
    fake.engine._speculator = Speculator(fake.engine.scheduler, (EverySecond(),), Broken())
    fake.engine.add(0, add_request([1, 2, 3], max_tokens=60, temperature=0.0))
    assert finish(fake) == {(0, 0): greedy([1, 2, 3], 60)}
    assert caplog.messages == [f"the draft model failed; the next {FIRST_PAUSE} steps go without"]
    assert fake.engine.scheduler.counters.num_steps < 30


# --- what is rejected --------------------------------------------------------------------------------------------

NOTHING_LEFT = "allowed_token_ids must leave an id that bad_words, begin_bans and min_tokens do not ban, got none"


@pytest.mark.parametrize(
    ("add", "reason", "message"),
    [
        (add_request([]), RejectReason.INVALID, "the prompt must hold at least one token"),
        (add_request([1], num_choices=0), RejectReason.INVALID, "num_choices must be at least 1, got 0"),
        (
            AddRequest(TokensInput([1]), SamplingParams(), adapter=Adapter("x", "/x", ""), request_id=0),
            RejectReason.INVALID,
            "this model takes no adapters, got x: max_loras must be at least 1, but is 0",
        ),
        (
            add_request([1] * 30, max_tokens=11),
            RejectReason.CONTEXT_LENGTH,
            "the context holds 40 tokens, but 30 in the prompt and 11 of output were asked for",
        ),
        (
            add_request([1] * 40, max_tokens=None),
            RejectReason.CONTEXT_LENGTH,
            "the context holds 40 tokens, but 40 in the prompt and 1 of output were asked for",
        ),
        (add_request([1, 50]), RejectReason.INVALID, "prompt must hold token ids from 0 to 49, got 50"),
        (add_request([-1, 3]), RejectReason.INVALID, "prompt must hold token ids from 0 to 49, got -1"),
        (
            AddRequest(
                TokensInput([1]), SamplingParams(), guidance=Guidance(prediction_token_ids=(3, 51)), request_id=0
            ),
            RejectReason.INVALID,
            "prediction must hold token ids from 0 to 49, got 51",
        ),
        (
            add_request([1], logit_bias={60: 1.0}),
            RejectReason.INVALID,
            "logit_bias must hold token ids from 0 to 49, got 60",
        ),
        (
            add_request([1], stop_token_ids=(3, 70)),
            RejectReason.INVALID,
            "stop_token_ids must hold token ids from 0 to 49, got 70",
        ),
        (
            add_request([1], allowed_token_ids=(-2, 3)),
            RejectReason.INVALID,
            "allowed_token_ids must hold token ids from 0 to 49, got -2",
        ),
        (
            add_request([1], allowed_token_ids=(3,) * 51),
            RejectReason.INVALID,
            "allowed_token_ids must hold at most 50 ids, got 51",
        ),
        (
            add_request([1], stop_token_ids=(3,) * 51),
            RejectReason.INVALID,
            "stop_token_ids must hold at most 50 ids, got 51",
        ),
        (add_request([1], allowed_token_ids=(7,), min_tokens=1), RejectReason.INVALID, NOTHING_LEFT),
        (
            add_request(
                [1], allowed_token_ids=(4, 5, 7), bad_words_token_ids=((4,),), stop_token_ids=(5,), min_tokens=1
            ),
            RejectReason.INVALID,
            NOTHING_LEFT,
        ),
        (
            add_request([1], bad_words_token_ids=((1, 99),)),
            RejectReason.INVALID,
            "bad_words must hold token ids from 0 to 49, got 99",
        ),
        (
            guided(add_request([1]), None, reasoning_budget=ReasoningBudget(5, 50)),
            RejectReason.INVALID,
            "reasoning_budget must hold token ids from 0 to 49, got 50",
        ),
        (
            guided(add_request([1]), None, reasoning_budget=ReasoningBudget(-1, 4)),
            RejectReason.INVALID,
            "reasoning_budget must be at least 0, got -1",
        ),
    ],
)
def test_a_rejection_names_field_bound_and_value(add: AddRequest, reason: RejectReason, message: str) -> None:
    fake = make_engine(max_model_len=40, eos_token_ids=(7,))
    with pytest.raises(RejectedError) as caught:
        fake.engine.add(0, add)
    assert (caught.value.reason, str(caught.value)) == (reason, message)
    assert not fake.engine.has_work


def test_an_allowed_end_is_taken_in_where_it_is_not_banned() -> None:
    fake = make_engine(eos_token_ids=(7,))
    for params in ({}, {"min_tokens": 1, "ignore_eos": True}):
        fake.engine.add(0, add_request([1], allowed_token_ids=(7,), **params))
        finish(fake)


def test_the_longest_request_that_fits_is_taken_in() -> None:
    fake = make_engine(max_model_len=40)
    fake.engine.add(0, add_request([1] * 40, 0, max_tokens=0))
    fake.engine.add(0, add_request([1] * 39, 1, max_tokens=None))
    assert {key: len(ids) for key, ids in finish(fake).items()} == {(0, 0): 0, (1, 0): 1}


def test_a_full_queue_rejects() -> None:
    fake = make_engine(max_num_waiting=2)
    fake.engine.add(0, add_request([1], 0))
    fake.engine.add(0, add_request([1], 1))
    with pytest.raises(RejectedError, match="2 requests are waiting, at most 2 may") as caught:
        fake.engine.add(0, add_request([1], 2))
    assert caught.value.reason is RejectReason.QUEUE_FULL
    fake.step()
    fake.engine.add(0, add_request([1], 2))


def test_a_request_whose_deadline_has_passed_times_out() -> None:
    fake = make_engine()
    fake.engine.add(3, add_request([1], 7, num_choices=2, deadline=0.0))
    outputs = fake.step()
    assert [(c, o.request_id, o.index, o.finish_reason) for c, o in outputs] == [
        (3, 7, 0, FinishReason.TIMEOUT),
        (3, 7, 1, FinishReason.TIMEOUT),
    ]
    assert not fake.engine.has_work
    assert fake.runner.batches == []


# --- what fails --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at_launch", [False, True])
def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(
    overlap: bool, at_launch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    fake = make_engine(overlap=overlap, max_num_seqs=2)
    for request_id in range(3):
        fake.engine.add(0, add_request([request_id] * 9, request_id, max_tokens=5, temperature=0.0))
    fake.step()
    fake.runner.fails_at_launch, fake.runner.fails_at_collect = at_launch, not at_launch
    outputs = fake.step()
    assert [(o.request_id, o.finish_reason, o.message) for _, o in outputs] == [
        (request_id, FinishReason.ERROR, "the step failed: RuntimeError") for request_id in range(2)
    ]
    fake.engine.scheduler.check_integrity()
    fake.engine.add(0, add_request([0] * 9, 9, max_tokens=5, temperature=0.0))  # what the failed one wanted
    assert finish(fake) == {(2, 0): greedy([2] * 9, 5), (9, 0): greedy([0] * 9, 5)}


@pytest.mark.parametrize(("num_kept_states", "num_steps"), [(None, 2), (0, 1)])
def test_a_fork_whose_copy_was_in_a_failed_step_is_recomputed(
    num_kept_states: int | None, num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """That step had no budget left for the fork itself, which went on from what lay in its block before."""
    caplog.set_level(logging.CRITICAL)
    fake = make_engine(max_num_seqs=2, max_num_batched_tokens=1, num_kept_states=num_kept_states)
    fake.engine.add(0, add_request([1, 2], num_choices=2, max_tokens=3, temperature=0.0))
    for _ in range(num_steps):
        fake.step()
    fake.runner.fails_at_launch = True
    assert [(o.index, o.finish_reason) for _, o in fake.step()] == [(0, FinishReason.ERROR)]
    fake.engine.scheduler.check_integrity()
    assert finish(fake) == {(0, 1): greedy([1, 2], 3)}


def test_an_engine_that_has_lost_its_device_ends(caplog: pytest.LogCaptureFixture) -> None:
    """It failed every request from then on, where the supervisor would have started another one."""
    caplog.set_level(logging.CRITICAL)
    fake = make_engine()
    fake.runner.fails_at_launch = fake.runner.is_device_lost = True
    fake.engine.add(0, add_request([1] * 9))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        fake.step()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none left"), RuntimeError("CUDA error: out of memory")])
def test_a_step_without_memory_makes_those_after_it_smaller(
    error: RuntimeError, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    fake = make_engine(max_num_seqs=2, max_num_batched_tokens=20)
    fake.runner.fails_at_launch, fake.runner.error = True, error
    fake.engine.add(0, add_request([1] * 40, max_tokens=5))
    assert [o.message for _, o in fake.step()] == ["the step failed: the device ran out of memory"]
    fake.engine.add(0, add_request([2] * 40, 1, max_tokens=5, temperature=0.0))
    assert finish(fake) == {(1, 0): greedy([2] * 40, 5)}
    assert max(batch.num_tokens for batch in fake.runner.batches[1:]) == 10
    for _ in range(3):
        fake.engine.scheduler.token_budget.halve()
    fake.engine.add(0, add_request([3] * 40, 2, max_tokens=1))
    fake.step()
    assert fake.runner.batches[-1].num_tokens == 6  # two requests and a block


def test_the_token_budget_recovers(caplog: pytest.LogCaptureFixture) -> None:
    """One step without memory, for whatever reason, made all steps smaller until the engine was started again."""
    caplog.set_level(logging.CRITICAL)
    fake = make_engine(max_num_seqs=2, max_num_batched_tokens=20, num_blocks=100, max_model_len=400)
    fake.runner.fails_at_launch, fake.runner.error = True, torch.OutOfMemoryError("none left")
    fake.engine.add(0, add_request([1] * 40))
    fake.step()
    for request_id in range(FIRST_TRIAL // 30 + 1):
        fake.engine.add(0, add_request([request_id + 2] * 300, request_id, max_tokens=1))
        finish(fake)
    num_tokens = [batch.num_tokens for batch in fake.runner.batches[1:]]
    assert set(num_tokens[:FIRST_TRIAL]) == {10}
    assert max(num_tokens[FIRST_TRIAL:]) == 20


def cached_tokens(fake: FakeEngine, add: AddRequest) -> int | None:
    fake.engine.add(0, add)
    found = [output.num_cached_tokens for _, output in iter_outputs(fake)]
    return next(count for count in found if count is not None)


def iter_outputs(fake: FakeEngine) -> list[tuple[int, RequestOutput]]:
    outputs = []
    while fake.engine.has_work:
        outputs += fake.step()
    return outputs


def caching(add: AddRequest, policy: CachePolicy) -> AddRequest:
    return msgspec.structs.replace(add, caching=policy)


def test_a_request_without_caching_finds_nothing_and_leaves_nothing() -> None:
    fake = make_engine()
    pool = fake.engine.scheduler.kv.pools[0]
    private = CachePolicy(is_used=False)
    prompt = list(range(20))
    for _ in range(2):
        assert cached_tokens(fake, caching(add_request(prompt, num_choices=3, max_tokens=6), private)) == 0
        assert (pool.num_indexed, pool.num_used) == (0, 0)
    assert cached_tokens(fake, add_request(prompt)) == 0
    assert cached_tokens(fake, caching(add_request(prompt), private)) == 0
    assert cached_tokens(fake, add_request(prompt)) == 16
    fake.engine.scheduler.check_integrity()


def test_a_pinned_prefix_outlives_what_is_used_later_until_its_time_is_over() -> None:
    def is_kept(pins: tuple[Pin, ...]) -> bool:
        fake = make_engine(num_blocks=17, max_num_pinned_blocks=3)
        prompt = list(range(16))
        cached_tokens(fake, caching(add_request([*prompt, 1]), CachePolicy(pins=pins)))
        for i in range(4):  # each of them fills most of the cache
            cached_tokens(fake, add_request([30 + i] * 40, max_tokens=3))
        fake.engine.scheduler.check_integrity()
        found = cached_tokens(fake, add_request([*prompt, 1]))
        assert found in (0, 12), "three blocks may be pinned"
        return found == 12

    assert is_kept((Pin(16, 60.0),))
    assert not is_kept(())
    assert not is_kept((Pin(16, 0.0),))


def test_pinned_blocks_give_way_when_nothing_else_is_left() -> None:
    fake = make_engine(num_blocks=9, max_num_pinned_blocks=8)
    cached_tokens(fake, caching(add_request(list(range(12))), CachePolicy(pins=(Pin(12, 60.0),))))
    assert len(fake.engine.scheduler.kv.pins) == 3
    assert cached_tokens(fake, add_request([40] * 31, max_tokens=1)) == 0
    assert cached_tokens(fake, add_request([41] * 31, max_tokens=1)) == 0
    fake.engine.scheduler.check_integrity()
