"""Simulates replicas for `weft simulate`: everything of an engine but its device, on a clock of its own.

Scheduler, cache manager, budgets and cost model are the real ones. A runner that computes nothing moves the clock by
what a step would take. Reads `ToSimulation` from standard input, one JSON object per line, after a first line with the
engine's options. The argument is a file with what steps cost. If it does not exist, `measure` loads the model, and what
it finds is written there.
"""

import itertools
import logging
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec
import torch

from weft.engine.batch import Batch, RowMasks, StepResult
from weft.engine.cache.manager import KVCacheManager
from weft.engine.cache.specs import CacheSpec, PagedKV, StateSpec
from weft.engine.loop.engine import Engine
from weft.engine.loop.pending import RejectedError
from weft.engine.request import Outputs
from weft.engine.runner.model_runner import LaunchedStep
from weft.engine.schedule.scheduler import ScheduledStep, Scheduler
from weft.engine.schedule.step_cost import StepCostModel, StepLoad
from weft.engine.start.launch import cannot_load, follow_parent
from weft.engine.start.startup import start
from weft.engine.wire import errors as logs
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, TokensOutput
from weft.engine.wire.options import Arrive, Begin, EngineOptions, Finished, Load, Look, StepCosts, ToSimulation
from weft.engine.wire.params import SamplingParams

logger = logging.getLogger(__name__)

_FIRST_LOADS = (1, 16, 64)
"""Prompts that an engine has computed before it serves (`warm_up.py`)."""


class SimulatedDevice:
    """An executor whose steps take what they cost, one after the other. `now` is the clock of the host."""

    def __init__(self, costs: StepCosts) -> None:
        """Begin at zero seconds."""
        self.now = 0.0
        self.busy_s = 0.0
        self._costs = costs
        self._free_at = 0.0
        self._load = StepLoad()

    def seconds(self, load: StepLoad) -> float:
        """What a step takes."""
        base, per_token, per_kv_token, per_pair = self._costs.seconds
        num_kv_tokens, query_context = load.num_kv_tokens, load.query_context
        return base + per_token * load.num_tokens + per_kv_token * num_kv_tokens + per_pair * query_context

    def expect(self, step: ScheduledStep) -> None:
        """Learn what the next launch computes."""
        self._load = step.load

    def launch(self, batch: Batch, masks: "Future[RowMasks] | None") -> tuple[float, float, int]:
        """Begin when the step before has ended."""
        seconds = self.seconds(self._load)
        self._free_at = max(self.now, self._free_at) + seconds
        self.busy_s += seconds
        return self._free_at, seconds, len(batch.row_indices)

    def collect(self, launched: tuple[float, float, int]) -> StepResult:
        """Wait until the step has ended."""
        end, seconds, num_rows = launched
        self.now = max(self.now, end)
        return StepResult([0] * num_rows, {}, [], device_s=seconds)

    def prepare(self) -> bool:
        """There is nothing to prepare."""
        return False

    def check_device(self) -> None:
        """It never fails."""

    def load_adapter(self, slot: int, folder: pathlib.Path) -> "Future[str]":
        """Takes no time."""
        loaded: Future[str] = Future()
        loaded.set_result("")
        return loaded


class SimulatedReplica:
    """An engine over a simulated device, and what its clients see."""

    def __init__(self, costs: StepCosts) -> None:
        """Start empty, at zero seconds."""
        self.device = SimulatedDevice(costs)
        specs: list[CacheSpec] = [PagedKV(1, 1, window) for window in costs.windows]
        specs += [StateSpec((1,), torch.float32)] * costs.num_state_groups
        caches_prefixes = costs.options.prefix_caching and (
            not costs.num_state_groups or costs.num_states > costs.max_num_seqs
        )
        kv = KVCacheManager(costs.num_blocks, costs.block_size, specs, caches_prefixes, num_states=costs.num_states)
        cost = StepCostModel()
        for num_tokens in _FIRST_LOADS:
            load = StepLoad()
            load.add(num_tokens, 0)
            cost.observe(load, self.device.seconds(load))
        scheduler = Scheduler(
            kv,
            cost,
            max_num_seqs=costs.max_num_seqs,
            max_num_batched_tokens=costs.max_num_batched_tokens,
            itl_target_s=costs.itl_target_s,
            is_ahead=costs.overlap,
            clock=lambda: self.device.now,
        )
        self.engine = Engine(
            scheduler,
            self.device,
            vocab_size=costs.vocab_size,
            max_model_len=costs.max_model_len,
            max_num_waiting=costs.options.max_num_waiting,
            overlap=costs.overlap,
            before_launch=self.device.expect,
        )
        self._last_token: dict[int, float] = {}
        self._arrived: dict[int, float] = {}
        self.first_token_s: dict[int, float] = {}
        self.gaps_s: list[float] = []
        self.output_tokens = 0

    def load(self) -> Load:
        """What it tells routers."""
        scheduler = self.engine.scheduler
        usage = max(pool.num_used for pool in scheduler.kv.pools) / scheduler.kv.num_blocks
        return Load(len(scheduler.running), self.engine.num_waiting, usage)

    def add(self, number: int, prompt: list[int], output_tokens: int, time: float) -> None:
        """Take a request. It is seen between two steps, as a real engine sees it.

        Raises:
            RejectedError: It is refused.
        """
        self.run_until(time)
        params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
        self.engine.add(0, AddRequest(TokensInput(prompt), params, request_id=number))
        self._arrived[number] = time

    def run_until(self, time: float) -> None:
        """Run steps that begin before a time."""
        while self.engine.has_work and self.device.now < time:
            num_steps = self.engine.scheduler.counters.num_steps
            self._take(self.engine.step())
            if self.engine.scheduler.counters.num_steps == num_steps and not self.engine.launched_steps:
                raise RuntimeError("requests wait, and none can run")
        self.device.now = max(self.device.now, time) if time != float("inf") else self.device.now

    def _take(self, outputs: Outputs) -> None:
        now = self.device.now
        for _, output in outputs:
            if not isinstance(output, TokensOutput) or not output.token_ids:
                continue
            number = output.request_id
            if number in self._last_token:
                self.gaps_s.append(now - self._last_token[number])
            else:
                self.first_token_s[number] = now - self._arrived[number]
            self._last_token[number] = now
            self.output_tokens += len(output.token_ids)


class Simulation:
    """Replicas on one clock, each run no further than what it was told."""

    def __init__(self, costs: StepCosts, num_replicas: int) -> None:
        """Start all of them, empty."""
        self._vocab_size = costs.vocab_size
        self._replicas = [SimulatedReplica(costs) for _ in range(num_replicas)]
        self._num_arrived = 0
        self._refused: dict[str, int] = {}

    def arrive(self, message: Arrive) -> None:
        """Give a request to its replica."""
        number, self._num_arrived = self._num_arrived, self._num_arrived + 1
        prompt = prompt_ids(message, number, self._vocab_size)
        try:
            self._replicas[message.replica].add(number, prompt, message.output_tokens, message.time)
        except RejectedError as error:
            self._refused[error.reason.name] = self._refused.get(error.reason.name, 0) + 1

    def look(self, time: float) -> list[Load]:
        """How all replicas are at a time."""
        for replica in self._replicas:
            replica.run_until(time)
        return [replica.load() for replica in self._replicas]

    def finish(self) -> Finished:
        """Run everything to its end."""
        for replica in self._replicas:
            replica.run_until(float("inf"))
        first = {number: s for replica in self._replicas for number, s in replica.first_token_s.items()}
        counters = [replica.engine.scheduler.counters for replica in self._replicas]
        return Finished(
            first_token_s=[first[number] for number in sorted(first)],
            gaps_s=[gap for replica in self._replicas for gap in replica.gaps_s],
            prompt_tokens=sum(c.prompt_tokens for c in counters),
            output_tokens=sum(replica.output_tokens for replica in self._replicas),
            cached_tokens=sum(c.prefix_cache_hits for c in counters),
            busy_s=sum(replica.device.busy_s for replica in self._replicas),
            end_s=max(replica.device.now for replica in self._replicas),
            refused=self._refused,
        )


def prompt_ids(message: Arrive, number: int, vocab_size: int) -> list[int]:
    """Made-up ids: equal for equal hash ids, else different in the first of a block; what has no hash id is unique."""
    ids: list[int] = []
    for is_own, block in [*((0, block) for block in message.hash_ids), (1, number)]:
        digits, rest = [is_own], block
        for _ in range(8):
            rest, digit = divmod(rest, vocab_size)
            digits.append(digit)
        length = message.num_tokens if is_own else message.hash_tokens
        ids += (digits + [0] * length)[:length]
    return ids[: message.num_tokens]


_NO_MATTER = {"log_format", "stall_timeout_s"}
"""Options that change no step."""


def costs_for(options: EngineOptions, path: pathlib.Path | None) -> StepCosts:
    """Read what steps cost, or measure and write it.

    Raises:
        ModelError: The file holds something else, or was measured with other options.
    """
    if path is None or not path.exists():
        costs = measure(options)
        if path is not None:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(costs)) + b"\n")
        return costs
    try:
        costs = msgspec.json.decode(path.read_bytes(), type=StepCosts)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"costs: {path} does not hold costs of steps: {error}") from None
    told, known = msgspec.to_builtins(options), msgspec.to_builtins(costs.options)
    told["model"], known["model"] = (pathlib.Path(each["model"]).name for each in (told, known))
    for name in told:
        if told[name] != known[name] and name not in _NO_MATTER:
            raise ModelError(
                f"costs: {path} was measured with {name} {known[name]}, and now it is {told[name]}: name another file"
            )
    return costs


MEASURE_S = 20.0
"""Time for measuring; the first round of each kind is run even if it takes longer."""
_OUTPUT_TOKENS = 12
_NUM_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
_PROMPT_TOKENS = (16, 100, 400, 1600, 6400)

Sample = tuple[StepLoad, float]


def measure(options: EngineOptions, seconds: float = MEASURE_S) -> StepCosts:
    """Load the model as `weft serve` does, answer made-up prompts for so long, and fit what their steps cost.

    The seconds of a step are those between the ends of two, so they hold what the host does for it.

    Raises:
        ModelError: The model cannot be loaded, or is of a kind that is not simulated.
    """
    started = start(options, "measure")
    info, specs = started.info, started.engine.scheduler.kv.specs
    if info.task != "generate" or not all(isinstance(spec, PagedKV | StateSpec) for spec in specs):
        raise ModelError("only models that generate, with layers of Weft's own, can be simulated")
    samples = list(_measure(started.engine, info.vocab_size, info.max_model_len, seconds))
    model = fit(samples)
    predicted = [model.predict(load) for load, _ in samples]
    # The fit follows usual steps, not the ones that are late.
    scale = sum(taken for _, taken in samples) / sum(predicted)
    error = statistics.median(abs(scale * p / taken - 1) for p, (_, taken) in zip(predicted, samples, strict=True))
    logger.info("measured %d steps; half are predicted within %.0f %%", len(samples), error * 100)
    return StepCosts(
        options=options,
        device=info.device,
        seconds=[scale * value for value in model.coefficients],
        median_error=error,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        num_states=started.plan.num_states,
        windows=[spec.sliding_window or spec.span for spec in specs if isinstance(spec, PagedKV)],
        num_state_groups=sum(isinstance(spec, StateSpec) for spec in specs),
        itl_target_s=started.config.itl_target_s,
        overlap=started.config.overlap,
    )


def fit(samples: list[Sample]) -> StepCostModel:
    """A model in which all samples count alike."""
    model = StepCostModel(forgetting=1.0)
    for load, seconds in samples:
        model.observe(load, seconds)
    model.fit()
    return model


def _measure(engine: Engine[LaunchedStep], vocab_size: int, max_model_len: int, seconds: float) -> Iterator[Sample]:
    """Rounds of requests that come together, of every number and length that there is room for; longer ones last."""
    generator, ids = random.Random(0), itertools.count()
    room = engine.scheduler.kv.num_blocks * engine.scheduler.kv.block_size // 2
    longest = max_model_len - _OUTPUT_TOKENS
    kinds = [
        (number, length)
        for number, length in itertools.product(_NUM_REQUESTS, sorted({min(n, longest) for n in _PROMPT_TOKENS}))
        if number == 1 or number * (length + _OUTPUT_TOKENS) <= min(room, 16 * max(_PROMPT_TOKENS))
    ]
    kinds.sort(key=lambda kind: kind[0] * kind[1])
    began = time.perf_counter()
    for number, length in itertools.cycle(kinds):
        for _ in range(number):
            prompt = [generator.randrange(vocab_size) for _ in range(length)]
            params = SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0, ignore_eos=True)
            engine.add(0, AddRequest(TokensInput(prompt), params, request_id=next(ids)))
        ended = time.perf_counter()
        while engine.has_work:
            engine.step()
            now = time.perf_counter()
            for step in engine.ended_steps:
                yield step.load, (now - ended) / len(engine.ended_steps)
            ended = now if engine.ended_steps else ended
        if now - began > seconds:
            return


def main() -> int:
    """Answer messages until standard input ends, or the parent does, which alone heeds signals."""
    if not follow_parent(os.getppid()):
        return 1
    options = msgspec.json.decode(sys.stdin.readline(), type=EngineOptions)
    logs.configure(options.log_format, "engine")
    try:
        costs = costs_for(options, pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    except Exception as error:
        return cannot_load(error)
    _answer(costs)
    decoder = msgspec.json.Decoder(ToSimulation)
    simulation = Simulation(costs, 1)
    for line in sys.stdin:
        message = decoder.decode(line)
        if isinstance(message, Begin):
            simulation = Simulation(costs, message.num_replicas)
        elif isinstance(message, Arrive):
            simulation.arrive(message)
        elif isinstance(message, Look):
            _answer(simulation.look(message.time))
        else:
            _answer(simulation.finish())
    return 0


def _answer(answer: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
