"""How far steps are queued ahead of a device, by a clock that host and device share."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.engine.fake_runner import VOCAB_SIZE
from tests.engine.paged import paged_specs
from tests.engine.requests_for_tests import add_request
from weft.engine.batch import Batch, StepResult
from weft.engine.cache.manager import KVCacheManager
from weft.engine.loop.engine import Engine
from weft.engine.schedule.scheduler import Scheduler
from weft.engine.schedule.step_cost import StepCostModel, StepLoad
from weft.engine.start.warm_up import _CUDA_WARM_UP_TOKENS

HOST_S = 0.006
"""What the host takes to launch an eager step of a model of 36 layers."""

PROMPT_TOKENS = 127_000


def seconds(load: StepLoad) -> float:
    """A model of 8 billion parameters at half of what an H100 computes: bytes of the weights, tokens, attention."""
    return 0.005 + load.num_tokens * 4e-5 + load.query_context * 1.5e-9 + load.num_kv_tokens * 4.5e-8


@dataclass
class Device:
    """Computes steps in order, each when the one before it has ended; implements `Executor`."""

    now_s: float = 1000.0
    ends: deque[float] = field(default_factory=deque)
    most_steps: int = 0
    queued_s: list[float] = field(default_factory=list)

    def launch(self, batch: Batch, masks: object) -> tuple[float, float, int]:
        self.now_s += HOST_S
        load = StepLoad()
        for num_tokens, seq_len in zip(np.diff(batch.query_start_locs).tolist(), batch.seq_lens.tolist(), strict=True):
            load.add(num_tokens, seq_len - num_tokens)
        start = max(self.now_s, self.ends[-1] if self.ends else 0.0)
        self.ends.append(start + seconds(load))
        while self.ends[0] <= self.now_s:
            self.ends.popleft()
        self.queued_s.append(self.ends[-1] - self.now_s)
        self.most_steps = max(self.most_steps, len(self.ends))
        return start, self.ends[-1], len(batch.row_indices)

    def collect(self, launched: tuple[float, float, int]) -> StepResult:
        start, end, num_rows = launched
        self.now_s = max(self.now_s, end)
        return StepResult([7] * num_rows, {}, [], device_s=end - start)

    def prepare(self) -> bool:
        return False

    def check_device(self) -> None:
        raise AssertionError("a step failed")


def make_engine(device: Device, monkeypatch: pytest.MonkeyPatch) -> Engine:
    for module in ("loop.engine.time.perf_counter", "loop.engine.time.monotonic", "schedule.scheduler.time.monotonic"):
        monkeypatch.setattr(f"weft.engine.{module}", lambda: device.now_s)
    cost = StepCostModel()
    for num_tokens in _CUDA_WARM_UP_TOKENS:
        load = StepLoad()
        load.add(num_tokens, 0)
        cost.observe(load, seconds(load))
    kv = KVCacheManager(20_000, 16, paged_specs(None))
    scheduler = Scheduler(kv, cost, max_num_seqs=256, max_num_batched_tokens=8192, itl_target_s=0.05, is_ahead=True)
    limits = {"vocab_size": VOCAB_SIZE, "max_model_len": 200_000, "max_num_waiting": 1000}
    return Engine(scheduler, device, overlap=True, **limits)  # type: ignore[arg-type]


def test_a_long_prompt_queues_two_steps_and_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without samples were taken to end at once: 13.7 s were queued, and the target granted steps of 220 ms."""
    device = Device()
    engine = make_engine(device, monkeypatch)
    engine.add(0, add_request([1] * PROMPT_TOKENS, 0, max_tokens=400, temperature=0.0, ignore_eos=True))
    for _ in range(8):
        engine.step()
    engine.add(0, add_request([2] * 40, 1, max_tokens=50, temperature=0.0, ignore_eos=True))
    arrived_s, first_s = device.now_s, None
    while first_s is None:
        first_s = next((device.now_s for _, output in engine.step() if output.request_id == 1), None)
    while engine.has_work:
        engine.step()
    assert device.most_steps <= 2
    assert max(device.queued_s) <= 0.1
    assert first_s - arrived_s <= 0.15
    load = StepLoad()
    load.add(1, PROMPT_TOKENS)
    assert seconds(load) + seconds_of_prompt(engine, load) <= 0.05, "what is granted beside a stream keeps the target"


def seconds_of_prompt(engine: Engine, decodes: StepLoad) -> float:
    """Seconds that the tokens of a new prompt add to a step, of as many as the target grants beside these decodes."""
    granted = engine.scheduler.cost.num_tokens_within(decodes, 0, 0.05 / engine.scheduler.cost.tail_ratio)
    load = StepLoad()
    load.add(1, PROMPT_TOKENS)
    alone_s = seconds(load)
    load.add(granted, 0)
    return seconds(load) - alone_s
