"""How long streams pause for the prompts of others, on machines of any speed, by a clock that the steps move."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.engine.paged import paged_specs
from tests.engine.requests_for_tests import request
from weft.engine.batch import StepResult
from weft.engine.cache.manager import KVCacheManager
from weft.engine.loop.output_collector import collect
from weft.engine.request import Request
from weft.engine.schedule.scheduler import Scheduler
from weft.engine.schedule.step_cost import MAX_DELAY_S, StepCostModel, StepLoad

FAST, SLOW, SLOWEST = (0.036, 0.0023), (0.15, 0.0052), (0.3, 0.02)
"""Seconds of a step, and of each of its tokens: two cores with AVX-512 and a model of 0.6 billion parameters, two that
know AVX2 alone, and one of those."""

LONGEST_S = {FAST: MAX_DELAY_S, SLOW: MAX_DELAY_S, SLOWEST: 1.9}
"""Longest pause of a stream. On the slowest machine the smallest step with a prompt takes 0.94 s,
and with forced ids beside it up to 1.88."""


@dataclass
class Machine:
    """A scheduler whose steps take so long."""

    base_s: float
    token_s: float
    monkeypatch: pytest.MonkeyPatch
    target_s: float | None = None
    now_s: float = 1000.0
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.monkeypatch.setattr("weft.engine.schedule.scheduler.time.monotonic", lambda: self.now_s)
        self.cost = StepCostModel()
        for num_tokens in (1, 16, 64):  # as an engine that starts
            load = StepLoad()
            load.add(num_tokens, 0)
            self.cost.observe(load, self.seconds(load))
        kv = KVCacheManager(20_000, 32, paged_specs(None))
        self.scheduler = Scheduler(
            kv, self.cost, max_num_seqs=128, max_num_batched_tokens=2048, itl_target_s=self.target_s
        )
        self._last: dict[int, float] = {}
        self._num_asked = 0

    def seconds(self, load: StepLoad) -> float:
        return self.base_s + self.token_s * load.num_tokens + 2e-9 * load.query_context

    def ask(self, num_prompt_tokens: int, num_output_tokens: int) -> Request:
        self._num_asked += 1
        ids = [self._num_asked] * num_prompt_tokens
        asked = request(ids, self._num_asked, max_tokens=num_output_tokens, max_model_len=100_000)
        self.scheduler.add(asked)
        return asked

    def step(self) -> None:
        step = self.scheduler.schedule()
        assert step is not None
        seconds = self.seconds(step.load)
        self.now_s += seconds
        self.cost.observe(step.load, seconds)
        for _, output in collect(self.scheduler, step, StepResult([7] * step.num_rows, {}, [])):
            if output.request_id in self._last:
                self.gaps.append(self.now_s - self._last[output.request_id])
            self._last[output.request_id] = self.now_s
            self.num_tokens += len(output.token_ids)

    def percentile(self, share: float) -> float:
        return sorted(self.gaps)[int(share * len(self.gaps))]


def sixteen_at_once(machine: Machine, num_requests: int = 32) -> float:
    """Workload B: whoever has its 128 tokens is followed by the next; returns tokens per second."""
    began_s = machine.now_s
    machine.ask(256, 128)  # the first one comes alone
    num_asked = 1
    while machine.scheduler.has_requests:
        machine.step()
        while num_asked < num_requests and len(machine.scheduler.requests) < 16:
            machine.ask(256, 128)
            num_asked += 1
    return machine.num_tokens / (machine.now_s - began_s)


@pytest.mark.parametrize("speed", [FAST, SLOW, SLOWEST])
def test_a_burst_of_prompts_pauses_a_stream_for_a_bounded_time(
    speed: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream stopped behind its first token for 64 of its steps, or for one of 2,048 tokens: 4.8, 10.8 and 41 s."""
    machine = Machine(*speed, monkeypatch)
    sixteen_at_once(machine)
    assert max(machine.gaps) <= LONGEST_S[speed]


def test_the_bound_costs_a_fast_machine_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """103.7 tokens a second without it, 101.2 with one of two seconds; 150 ms."""
    machine = Machine(*FAST, monkeypatch)
    assert sixteen_at_once(machine) > 97
    assert machine.percentile(0.99) < 0.16


@pytest.mark.parametrize("speed", [FAST, SLOW, SLOWEST])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_comes_no_pause_is_longer(
    speed: tuple[float, float], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, rng = Machine(*speed, monkeypatch), random.Random(seed)
    machine.ask(20, 400)
    for _ in range(300):
        if rng.random() < 0.1:
            for _ in range(rng.choice([1, 4, 20])):
                machine.ask(rng.choice([10, 300, 6000]), rng.choice([1, 20]))
        machine.step()
    assert max(machine.gaps) <= LONGEST_S[speed]


def force(monkeypatch: pytest.MonkeyPatch, num_forced: Callable[[], int]) -> None:
    """Behind every sampled id the grammar of the request leaves no choice about so many more."""
    monkeypatch.setattr(
        "weft.engine.loop.output_collector.certain_token_ids", lambda r: [7] * min(num_forced(), r.num_remaining_tokens)
    )


@pytest.mark.parametrize("speed", [FAST, SLOW, SLOWEST])
def test_no_pause_is_longer_where_a_grammar_forces_runs_of_ids(
    speed: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that computed a forced run was no stream, and prompts beside it had no bound: 4.8, 10.8 and 41 s."""
    machine = Machine(*speed, monkeypatch)
    force(monkeypatch, lambda: 4)
    machine.ask(20, 1500)
    for _ in range(30):
        machine.step()
    for _ in range(8):
        machine.ask(6000, 1)
    for _ in range(200):
        machine.step()
    assert max(machine.gaps) <= LONGEST_S[speed]


@pytest.mark.parametrize("speed", [FAST, SLOW, SLOWEST])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_comes_beside_forced_runs_no_pause_is_longer(
    speed: tuple[float, float], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, rng = Machine(*speed, monkeypatch), random.Random(seed)
    force(monkeypatch, lambda: rng.choice([0, 4]))
    machine.ask(20, 1000)
    for _ in range(300):
        if rng.random() < 0.1:
            for _ in range(rng.choice([1, 4])):
                machine.ask(rng.choice([10, 300, 6000]), rng.choice([1, 20]))
        machine.step()
    assert max(machine.gaps) <= LONGEST_S[speed]


def test_a_forced_run_without_prompts_is_computed_in_whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(*SLOW, monkeypatch)
    force(monkeypatch, lambda: 1000)
    machine.ask(20, 3003)
    num_steps = 0
    while machine.scheduler.has_requests:
        machine.step()
        num_steps += 1
    assert num_steps == 3


def test_a_target_bounds_every_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(*SLOW, monkeypatch, target_s=0.6)
    sixteen_at_once(machine)
    assert max(machine.gaps) <= 0.6


def test_streams_that_are_slower_by_themselves_lose_a_block_of_prompt_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1.5, 0.05, monkeypatch)
    sixteen_at_once(machine, 20)
    assert max(machine.gaps) <= machine.seconds(StepLoad(16, 0, 0)) + 32 * 0.05 + 0.01
