"""An hour of traffic in three minutes: requests of every kind come and go, and each of them is answered.

Every request but the oldest is preempted once, callers leave in the middle, and among the requests are some whose
answer is known. After every step the books are checked.
"""

import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import VOCAB_SIZE
from tests.engine.test_golden import Golden, PreemptingScheduler, golden, greedy
from tests.gpu.harness import start_engine
from weft.engine.loop.engine import Engine
from weft.engine.start import startup
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, FinishReason, RequestOutput
from weft.engine.wire.params import SamplingParams

MAX_NUM_OPEN = 40
LONGEST_PROMPT, LONGEST_OUTPUT = 150, 60
NUM_DRAIN_STEPS = 20_000


def some(generator: random.Random, **fields: object) -> SamplingParams:
    """Parameters of which each is what it usually is, more often than not."""
    choices: dict[str, tuple[object, ...]] = {
        "temperature": (0.0, 0.7, 1.5),
        "top_k": (0, 1, 20),
        "top_p": (1.0, 0.9),
        "min_p": (0.0, 0.05),
        "presence_penalty": (0.0, 1.0),
        "frequency_penalty": (0.0, -0.5),
        "repetition_penalty": (1.0, 1.2),
        "logprobs": (None, 0, 4),
        "prompt_logprobs": (None, None, None, 2),
        "logit_bias": ({}, {5: 4.0, 6: -100.0}),
        "bad_words_token_ids": ((), ((9,), (7, 8))),
        "allowed_token_ids": (None, None, None, (10, 11, 12, 13)),
        "stop_token_ids": ((), (17,)),
        "ignore_eos": (True, False),
    }
    drawn = {name: generator.choice(values) for name, values in choices.items()}
    return SamplingParams(**(drawn | fields))  # type: ignore[arg-type]


class Traffic:
    """Puts requests to an engine, and knows which of them are still to be answered."""

    def __init__(self, engine: Engine, known: Golden) -> None:
        self.engine = engine
        self.random = random.Random(0)
        self.num_known = self.num_aborted = self.num_finished = 0
        self._known = known
        self._prefix = self.random.choices(range(4, VOCAB_SIZE), k=70)
        self._adds: dict[int, AddRequest] = {}
        self._expected: dict[int, list[int]] = {}
        self._open: dict[tuple[int, int], list[int]] = {}

    def add(self) -> None:
        request_id = len(self._adds)
        if self.random.random() < 0.2:
            number = self.random.randrange(len(self._known.prompts))
            add = greedy(request_id, self._known.prompts[number])
            self._expected[request_id] = self._known.outputs[number]
        else:
            tail = self.random.choices(range(4, VOCAB_SIZE), k=self.random.randint(1, LONGEST_PROMPT))
            prompt = (self._prefix[: self.random.choice((0, 0, 32, 70))] + tail)[:LONGEST_PROMPT]
            params = some(self.random, max_tokens=self.random.randint(0, LONGEST_OUTPUT), seed=request_id)
            add = AddRequest(
                TokensInput(prompt),
                params,
                num_choices=self.random.choice((1, 1, 3)),
                priority=self.random.choice((0, 1)),
                request_id=request_id,
            )
        self._adds[request_id] = add
        self.engine.add(0, add)
        for index in range(add.num_choices):
            self._open[request_id, index] = []

    def abort(self) -> None:
        request_id, index = self.random.choice(list(self._open))
        one = self.random.choice((index, None))
        self.engine.abort(0, request_id, one)
        for key in [key for key in self._open if key[0] == request_id and one in (None, key[1])]:
            del self._open[key]
            self.num_aborted += 1

    def step(self) -> None:
        for _, output in self.engine.step():
            self._take(output)
        self.engine.scheduler.check_integrity()

    def run(self, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            if len(self._open) < MAX_NUM_OPEN and self.random.random() < 0.6:
                self.add()
            if self._open and self.random.random() < 0.03:
                self.abort()
            self.step()
        for _ in range(NUM_DRAIN_STEPS):
            if not self.engine.has_work:
                break
            self.step()
        assert not self._open, f"{len(self._open)} choices were never answered"

    def _take(self, output: RequestOutput) -> None:
        key = (output.request_id, output.index)
        assert key in self._open, "an output for nobody"
        assert output.finish_reason is not FinishReason.ERROR, output.message
        params = self._adds[output.request_id].sampling_params
        self._open[key] += output.token_ids
        assert all(0 <= token_id < VOCAB_SIZE for token_id in output.token_ids)
        if params.logprobs is not None:
            assert len(output.logprobs or []) == len(output.token_ids)
        for entry in (output.logprobs or []) + (output.prompt_logprobs or []):
            assert math.isfinite(entry.logprob)
            assert entry.logprob <= 1e-5
        if output.finish_reason is None:
            return
        token_ids = self._open.pop(key)
        self.num_finished += 1
        assert output.finish_reason is not FinishReason.LENGTH or len(token_ids) == params.max_tokens
        if output.request_id in self._expected:
            assert token_ids == self._expected[output.request_id]
            self.num_known += 1


def drive(device: str, known: Golden, monkeypatch: pytest.MonkeyPatch, goes_on: Callable[[], bool]) -> Traffic:
    monkeypatch.setattr(startup, "Scheduler", PreemptingScheduler)
    engine = start_engine(known.folder, device, num_blocks=60, block_size=32, max_num_seqs=24)
    traffic = Traffic(engine, known)
    traffic.run(goes_on)
    assert traffic.num_aborted > 0
    assert traffic.num_known > 0
    assert traffic.num_finished > traffic.num_aborted
    assert engine.scheduler.counters.num_preemptions > 0
    assert not engine.scheduler.requests
    return traffic


def test_a_moment_of_traffic(golden_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(250))
    traffic = drive("cpu", golden(golden_root, "mistral-wide"), monkeypatch, lambda: next(steps, None) is not None)
    assert traffic.num_finished > 30


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_an_hour_of_traffic(golden_root: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    end_time = time.monotonic() + request.config.getoption("--traffic-seconds")
    known = golden(golden_root, "qwen3-wide")
    traffic = drive("cuda", known, monkeypatch, lambda: time.monotonic() < end_time)
    assert traffic.num_finished > 30
