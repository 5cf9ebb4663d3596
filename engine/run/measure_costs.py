"""Measures what steps cost: loads the model as `weft serve` does, answers made-up prompts, and fits their steps.

The seconds of a step are those between the ends of two, so they hold what the host does for it.
"""

import itertools
import logging
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from weft.engine import config as engine_config
from weft.engine.cache.specs import PagedKV, StateSpec
from weft.engine.core.step_cost import StepCostModel, StepLoad
from weft.engine.loop.engine import Engine
from weft.engine.runner.model_runner import LaunchedStep
from weft.engine.shared.errors import ModelError
from weft.engine.shared.messages import AddRequest, TokensInput
from weft.engine.shared.options import EngineOptions
from weft.engine.shared.sampling_params import SamplingParams
from weft.engine.shared.simulation import StepCosts
from weft.engine.start.model_choice import read_model
from weft.engine.start.startup import start

logger = logging.getLogger(__name__)

MEASURE_S = 20.0
"""Time for measuring; the first round of each kind is run even if it takes longer."""
_OUTPUT_TOKENS = 12
_NUM_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
_PROMPT_TOKENS = (16, 100, 400, 1600, 6400)

Sample = tuple[StepLoad, float]


def measure(options: EngineOptions, seconds: float = MEASURE_S) -> StepCosts:
    """Load the model and measure its steps for so long.

    Raises:
        ModelError: The model cannot be loaded, or is of a kind that is not simulated.
    """
    started = start(options, "measure")
    info, specs = started.info, started.engine.scheduler.kv.specs
    if info.task != "generate" or not all(isinstance(spec, PagedKV | StateSpec) for spec in specs):
        raise ModelError("only models that generate, with layers of Weft's own, can be simulated")
    config = engine_config.resolve(options, read_model(Path(options.model), options.model_impl))
    samples = list(_measure(started.engine, info.vocab_size, info.max_model_len, seconds))
    model = fit(samples)
    predicted = [model.predict(load) for load, _ in samples]
    scale = sum(taken for _, taken in samples) / sum(
        predicted
    )  # the fit follows usual steps, not the ones that are late
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
        itl_target_s=config.itl_target_s,
        overlap=config.overlap,
    )


def fit(samples: list[Sample]) -> StepCostModel:
    """A model in which all samples count alike."""
    model = StepCostModel(forgetting=1.0)
    for load, seconds in samples:
        model.observe(load, seconds)
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
