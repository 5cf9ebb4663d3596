import logging

import pytest

from tests.engine.requests_for_tests import PerToken
from weft.engine.schedule.step_budget import SLOWDOWN, LatencyTarget, StepBudget
from weft.engine.schedule.step_cost import MAX_DELAY_S, StepCostModel, StepLoad


def budget(num_decodes: int, *, max_num_tokens: int = 1000, target_s: float = 0.1) -> StepBudget:
    decodes = StepLoad()
    for _ in range(num_decodes):
        decodes.add(1, 50)
    limit_s = target_s if num_decodes else None
    return StepBudget(PerToken(), max_num_tokens=max_num_tokens, block_size=16, limit_s=limit_s, decodes=decodes)


def limit(target: LatencyTarget, cost: StepCostModel, num_decodes: int, num_prompts: int = 1) -> float | None:
    load = StepLoad(num_tokens=num_decodes)
    return target.limit_s(load, cost, num_streams=num_decodes, num_prompts=num_prompts, now_s=0.0)


def test_without_decodes_only_tokens_count() -> None:
    assert budget(0).grant(5000, 0) == 1000
    assert budget(0).grant(300, 0) == 300


def test_beside_decodes_prefill_gets_what_is_left_of_the_target() -> None:
    step = budget(20)
    assert step.grant(5000, 0) == 80
    step.charge(50, 0)
    assert step.grant(5000, 0) == 30
    step.charge(30, 0)
    assert step.grant(5000, 0) == 0


def test_what_must_be_whole_is_granted_whole_or_not() -> None:
    """The first of a step is granted whatever is left, or a text longer than a halved budget would wait for ever."""
    step = budget(0, max_num_tokens=100)
    assert step.grant(150, 0, is_whole=True) == 150
    step.charge(60, 0)
    assert step.grant(41, 0, is_whole=True) == 0
    assert step.grant(40, 0, is_whole=True) == 40


def test_the_token_limit_holds_beside_decodes() -> None:
    assert budget(20, max_num_tokens=50).grant(5000, 0) == 30


def test_a_share_leaves_the_rest_to_others() -> None:
    step = budget(20)
    assert step.grant(5000, 0, 0.25) == 20
    step.charge(20, 0)
    assert step.grant(5000, 0, 0.5) == 30


def test_the_first_prefill_gets_a_block_though_the_target_is_missed() -> None:
    step = budget(200)
    assert step.grant(5000, 0) == 16
    assert step.grant(5, 0) == 5
    step.charge(16, 0)
    assert step.grant(5000, 0) == 0


def test_the_first_prefill_gets_what_must_be_whole_though_the_target_is_missed() -> None:
    step = budget(95)
    assert [budget(95).grant(500, 0, 0.25, least=n) for n in (0, 40, 2000)] == [16, 40, 500]
    step.charge(3, 0)
    assert step.grant(500, 0, least=40) == 2


def test_not_even_a_block_goes_beyond_the_token_limit() -> None:
    assert budget(200, max_num_tokens=205).grant(5000, 0) == 5
    assert budget(200, max_num_tokens=200).grant(5000, 0) == 0


def test_a_target_that_cannot_be_met_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    target, cost = LatencyTarget(0.1), PerToken()
    with caplog.at_level(logging.WARNING):
        assert limit(target, cost, 0, num_prompts=5) is None
        assert limit(target, cost, 90, num_prompts=500) == 0.1
        assert caplog.messages == []
        assert limit(target, cost, 123) == 0.1
        limit(target, cost, 200)
    assert caplog.messages == ["itl_target_ms=100 cannot be met: a step of 123 decodes alone takes about 123 ms"]


def test_a_target_is_planned_with_the_steps_that_take_longer_than_predicted() -> None:
    cost = PerToken()
    cost.tail_ratio = 1.25
    assert limit(LatencyTarget(0.1), cost, 8) == 0.08


def test_without_a_target_the_limit_follows_the_decodes_while_they_are_more() -> None:
    target, cost = LatencyTarget(None), PerToken()
    cost.tail_ratio = 2.0
    assert limit(target, cost, 0, num_prompts=1) is None
    assert limit(target, cost, 50, num_prompts=0) == 0.05 * SLOWDOWN
    assert limit(target, cost, 50, num_prompts=49) == 0.05 * SLOWDOWN
    assert limit(target, cost, 800, num_prompts=1) == MAX_DELAY_S / 2.0, "1.44 s, but one step may take twice as long"


def test_without_a_target_a_burst_of_prompts_goes_first_and_to_its_end() -> None:
    target, cost = LatencyTarget(None), PerToken()
    cost.tail_ratio = 1.25
    assert limit(target, cost, 8, num_prompts=8) == MAX_DELAY_S / 1.25
    assert limit(target, cost, 15, num_prompts=2) == MAX_DELAY_S / 1.25
    assert limit(target, cost, 17, num_prompts=1) == 0.017 * SLOWDOWN
