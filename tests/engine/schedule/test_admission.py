"""The cost of waiting is counted in operations of the interpreter, which no load on the machine changes."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.engine.requests_for_tests import request
from tests.engine.schedule.test_scheduler import make_scheduler
from weft.engine.batch import StepResult
from weft.engine.loop.output_collector import collect
from weft.engine.request import Request, RequestStatus
from weft.engine.schedule.scheduler import Scheduler
from weft.engine.schedule.waiting_queue import BLOCKS_PER_STEP


def num_operations(work: Callable[[], object]) -> int:
    """Bytecode operations that a call takes, all that it calls included."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def step(scheduler: Scheduler) -> None:
    for late in scheduler.waiting.take_expired(scheduler.clock()):
        scheduler.finish(late)
    scheduled = scheduler.schedule()
    if scheduled is not None:
        collect(scheduler, scheduled, StepResult([7] * scheduled.num_rows, {}, []))


def crowded(num_waiting: int) -> Scheduler:
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in range(2 + num_waiting):
        scheduler.add(request([request_id + 50] * 6, request_id, max_tokens=500, deadline=1e12))
    for _ in range(4):
        step(scheduler)
    return scheduler


@pytest.mark.parametrize(
    "work",
    [step, lambda scheduler: scheduler.abort(0, 50), lambda scheduler: scheduler.add(request([1], 10**6))],
    ids=["step", "abort", "add"],
)
def test_a_long_queue_costs_a_step_and_an_abort_no_more(work: Callable[[Scheduler], object]) -> None:
    """Each step copied the queue and looked at every deadline, each abort at every request."""
    few, many = crowded(60), crowded(6000)
    assert num_operations(lambda: work(many)) <= 1.5 * num_operations(lambda: work(few)) + 200


def followers(num_followers: int, num_blocks: int) -> tuple[Scheduler, list[Request]]:
    """One long prompt that many share, and a budget of one block a step."""
    scheduler = make_scheduler(num_blocks=12_000, max_num_seqs=500, max_num_batched_tokens=504)
    requests = [request([5] * (4 * num_blocks) + [i, i], i, max_model_len=10**6) for i in range(num_followers + 1)]
    for r in requests:
        scheduler.add(r)
    return scheduler, requests


def test_followers_of_a_long_prompt_are_not_looked_at_while_it_is_computed() -> None:
    """All of them were hashed in the first step, and looked up again in every step."""
    costs = []
    for num_followers in (2, 10):
        scheduler, requests = followers(num_followers, 5000)
        for _ in range(14):
            step(scheduler)
        assert [r.status for r in requests[:2]] == [RequestStatus.RUNNING, RequestStatus.WAITING]
        costs.append(num_operations(lambda scheduler=scheduler: step(scheduler)))  # type: ignore[misc]
    assert costs[1] <= 1.5 * costs[0]


def test_a_step_beside_a_running_request_hashes_a_bounded_number_of_blocks() -> None:
    scheduler, requests = followers(100, 3000)
    most = 0
    for _ in range(30):
        before = sum(len(r.block_hashes) for r in requests[1:])
        step(scheduler)
        scheduler.check_integrity()
        most = max(most, sum(len(r.block_hashes) for r in requests[1:]) - before)
    assert 1000 < most <= 2 * BLOCKS_PER_STEP


def test_followers_come_when_their_leader_has_gone_and_one_of_them_leads() -> None:
    scheduler, requests = followers(5, 400)
    step(scheduler)
    assert scheduler.waiting.first is None
    scheduler.abort(0, 0)
    scheduler.check_integrity()
    step(scheduler)
    assert [r.status for r in requests[1:3]] == [RequestStatus.RUNNING, RequestStatus.WAITING]
    for _ in range(60):
        step(scheduler)
        scheduler.check_integrity()
    assert not scheduler.has_requests
    assert scheduler.counters.prefix_cache_hits == 504 + 4 * 1600
