"""Rows without HTTP: the real engine in this process, stepped by hand.

A decode row lets a batch of random prompts reach its decodes, runs steps until what is made on first use is made, and
times the steps that follow with the host's clock: what a step costs where one is launched before the one before it is
collected. Random prompts share nothing, so the prefix cache finds nothing.
"""

import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from benchmarks.gpu import time_split
from benchmarks.gpu.job import Job, Reporter, UnavailableError
from benchmarks.gpu.models import Work, model_folder, read_work
from benchmarks.gpu.report import ENGINE
from weft.engine.loop.engine import Engine
from weft.engine.start.startup import Started, start
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, EngineOptions
from weft.engine.wire.params import SamplingParams

Feature = Literal["graphs", "overlap"]

NUM_WINDOWS = 4
"""The figure is the median of the mean step over so many windows."""

CHANGES: Mapping[str, Mapping[str, object]] = {
    "engine": {},
    "small": {},
    "deterministic": {"deterministic": True},
}
"""Group -> settings of the engine that differ from the defaults."""


@dataclass(frozen=True, slots=True)
class Case:
    """One decode row.

    Attributes:
        batch: Requests that decode.
        is_sampled: They draw from a filtered distribution instead of taking the most probable id.
        is_profiled: The time of its steps is split as well.
        without: What the engine does without meanwhile.
    """

    row: str
    batch: int
    is_sampled: bool = False
    is_profiled: bool = False
    without: Feature | None = None


def run(job: Job, reporter: Reporter) -> None:
    """Measure the rows of the job's group that are wanted."""
    sizes = job.sizes
    model = sizes.small if job.group == "small" else sizes.large
    reporter.progress(f"loading {model}")
    started = start_engine(job, model)
    bench = Bench(started, job, reporter, read_work(model_folder(job.scratch, model)))
    one, some, many = sizes.batches
    if "prefill" in job.rows:
        bench.prefill()
    cases = (
        Case("decode-1", one, is_profiled=True),
        Case("decode-64", some, is_profiled=True),
        Case("decode-256", many, is_profiled=True),
        Case("sampled-256", many, is_sampled=True, is_profiled=True),
        Case("deterministic-64", some),
        Case("small-1", one, is_profiled=True),
        Case("small-256", many, is_profiled=True),
        Case("plain-64", some, without="overlap"),
        Case("eager-1", one, without="graphs"),
        Case("eager-64", some, without="graphs"),
    )
    step_s: dict[Case, float] = {}
    for case in cases:
        if case.row in job.rows:
            try:
                step_s[case] = bench.decode(case)
            except UnavailableError as error:
                reporter.unavailable(case.row, str(error))
    # Behind all that is timed: a profiler may slow the process down for good.
    for case, seconds in step_s.items():
        if case.is_profiled:
            bench.profile(case, seconds)


def start_engine(job: Job, model: str) -> Started:
    """Start an engine as the server does, with random weights.

    Raises:
        UnavailableError: It has no setting that the group is about.
    """
    changes = CHANGES[job.group]
    if missing := [name for name in changes if name not in EngineOptions.__struct_fields__]:
        raise UnavailableError(f"the engine has no setting {missing[0]}")
    sizes = job.sizes
    max_num_seqs = max(sizes.batches)
    options = EngineOptions(
        model=str(model_folder(job.scratch, model)),
        device=job.device,
        load_format="dummy",
        max_model_len=max(sizes.context + 8 * sizes.num_steps, sizes.prefill[1] + 1),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(sizes.matrix_rows, max_num_seqs + 64),
        itl_target_ms=60_000.0,  # prompts need not wait for each other's decodes here
        **changes,  # type: ignore[arg-type]
    )
    return start(options, "benchmark")


class Bench:
    """Drives one engine; between two measurements it is empty."""

    def __init__(self, started: Started, job: Job, reporter: Reporter, work: Work) -> None:
        """Take over a fresh engine."""
        self._engine: Engine = started.engine
        self._vocab_size = started.info.vocab_size
        self._job = job
        self._reporter = reporter
        self._work = work
        self._random = random.Random(0)
        self._num_requests = 0
        reporter.note(
            f"{ENGINE}{job.group}", {"attention": started.info.attention_backend, "plan": started.plan.lines()}
        )

    def decode(self, case: Case) -> float:
        """Time decode steps of a batch; the mean context in the middle of the timed steps is about what was asked.

        Returns:
            Seconds of a step.
        """
        with self._without(case.without):
            return self._decode(case)

    def profile(self, case: Case, step_s: float) -> None:
        """Split the time of such steps, of which one takes step_s without a profiler."""
        self._begin(case)
        self._reporter.progress(f"{case.row}: profile")
        note = f"split of {case.row}"
        try:
            num_steps = max(2, self._job.sizes.num_steps // 8)
            self._reporter.note(note, time_split.split(self._engine.step, num_steps, step_s, self._job.device))
        except UnavailableError as error:
            self._reporter.note(f"no {note}", str(error))
        self._clear()

    def _begin(self, case: Case) -> None:
        """Let all requests of a batch reach their decodes, and what is made on first use be made."""
        self._reporter.progress(f"{case.row}: prompts")
        num_steps = self._job.sizes.num_steps
        num_prompt = max(1, self._job.sizes.context - num_steps) if case.batch > 1 else min(128, num_steps)
        seen: set[int] = set()
        self._add(case.batch, num_prompt, 6 * num_steps, case.is_sampled)
        while len(seen) < case.batch:
            seen |= {output.request_id for _, output in self._engine.step()}
        for _ in range(num_steps // 2):
            self._engine.step()

    def _decode(self, case: Case) -> float:
        self._begin(case)
        self._reporter.progress(f"{case.row}: steps")
        num_steps = self._job.sizes.num_steps
        windows, contexts = [], []
        for _ in range(NUM_WINDOWS):
            windows.append(self._step(max(1, num_steps // NUM_WINDOWS)))
            contexts.append(sum(request.num_tokens for request in self._engine.scheduler.running))
        if (number := len(self._engine.scheduler.running)) != case.batch:
            raise RuntimeError(f"{number} of {case.batch} requests were running at the end")
        step_s = statistics.median(windows)
        context = statistics.mean(contexts)
        self._reporter.measured(
            case.row,
            step_s * 1e3,
            {
                "memory_bytes_per_s": self._work.decode_bytes(context),
                "matrix_flops_per_s": self._work.decode_flops(case.batch, context),
            },
            window_ms=[round(seconds * 1e3, 4) for seconds in windows],
            tokens_per_s=case.batch / step_s,
            mean_context=context / case.batch,
        )
        self._clear()
        return step_s

    def prefill(self) -> None:
        """Time whole prompts that arrive together, from the first step to the last first token."""
        self._reporter.progress("prefill")
        num_prompts, num_tokens = self._job.sizes.prefill
        rounds = []
        for _ in range(1 + NUM_WINDOWS):
            self._add(num_prompts, num_tokens, 1, is_sampled=False)
            begin = time.perf_counter()
            self._clear()
            rounds.append(time.perf_counter() - begin)
        seconds = statistics.median(rounds[1:])
        self._reporter.measured(
            "prefill",
            seconds * 1e3,
            {"matrix_flops_per_s": self._work.prefill_flops(num_prompts, num_tokens)},
            round_ms=[round(value * 1e3, 3) for value in rounds],
            tokens_per_s=num_prompts * num_tokens / seconds,
        )

    def _step(self, num_steps: int) -> float:
        """Mean seconds of so many steps."""
        begin = time.perf_counter()
        for _ in range(num_steps):
            self._engine.step()
        return (time.perf_counter() - begin) / num_steps

    def _add(self, number: int, num_prompt: int, max_tokens: int, is_sampled: bool) -> None:
        for _ in range(number):
            self._num_requests += 1
            prompt = self._random.choices(range(self._vocab_size), k=num_prompt)
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=self._num_requests, ignore_eos=True)
            if is_sampled:
                params = msgspec.structs.replace(params, temperature=1.0, top_k=50, top_p=0.95)
            self._engine.add(0, AddRequest(TokensInput(prompt), params, request_id=self._num_requests))

    @contextlib.contextmanager
    def _without(self, feature: Feature | None) -> Iterator[None]:
        """Do without a feature for a while, which no setting asks for.

        Raises:
            UnavailableError: There is none here.
        """
        if feature is None:
            yield
            return
        owner: Any = self._engine if feature == "overlap" else self._engine._executor
        name, instead = f"_{feature}", False if feature == "overlap" else None
        kept = getattr(owner, name, instead)
        if not kept:
            raise UnavailableError(f"the engine has no {feature} here")
        setattr(owner, name, instead)
        try:
            yield
        finally:
            setattr(owner, name, kept)

    def _clear(self) -> None:
        """Run requests that end by themselves to their end, and stop the others."""
        if any(request.num_remaining_tokens > 1 for request in self._engine.scheduler.requests.values()):
            self._engine.abort_connection(0)
        while self._engine.has_work:
            self._engine.step()
