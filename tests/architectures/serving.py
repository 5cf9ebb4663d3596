"""Serves a checkpoint with Weft's engine in every way that may change its answers, and compares greedy ids.

The outcome is how the engine served it, or that it refused to start. A wrong answer is an error.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tests.architectures.checkpoints import NUM_OUTPUT_TOKENS, Golden, golden
from tests.engine.test_golden import PreemptingScheduler, run
from weft.engine.families.registry import identify
from weft.engine.kernels.torch.caches import ContextBackend
from weft.engine.loop.engine import Engine
from weft.engine.runner.model_runner import LaunchedStep
from weft.engine.schedule.scheduler import Scheduler
from weft.engine.start.startup import Started, start
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, EngineOptions
from weft.engine.wire.params import SamplingParams

NATIVE, TRANSFORMERS, REFUSED = "native", "transformers", "refused"
BY_REQUEST = "request by request, with caches of its own"
_CACHE_BYTES = 16 << 20


class WrongAnswerError(AssertionError):
    """The engine served a checkpoint and answered otherwise than transformers."""


@dataclass(frozen=True)
class Served:
    """How a checkpoint was served, each answer of it right, or why it was refused.

    Attributes:
        outcome: native, transformers or refused.
        detail: If it was served, whether repeated prompts were found in the prefix cache, or that there is none because
            each request runs alone; else the engine's message.
    """

    outcome: str
    detail: str


def serve(folder: Path, expected: Golden | None = None) -> Served:
    """Serve the checkpoint's golden prompts: cold, again, two choices each; in chunks and preempted, ahead.

    Raises:
        WrongAnswerError: An answer is not that of transformers.
    """
    expected = expected or golden(folder)
    try:
        wide = _start(folder, block_size=16, max_num_seqs=32)
    except ModelError as error:
        return Served(REFUSED, str(error).replace(f"{folder}/", "").partition(" (supported: ")[0])
    _check(wide.engine, expected, "cold")
    num_hits = wide.engine.scheduler.counters.prefix_cache_hits
    _check(wide.engine, expected, "again")
    is_found = wide.engine.scheduler.counters.prefix_cache_hits > num_hits
    _check(wide.engine, expected, "two choices", num_choices=2)
    with _preempting():
        narrow = _start(folder, block_size=8, max_num_seqs=4, max_num_batched_tokens=12).engine
    narrow._overlap = True
    _check(narrow, expected, "in chunks, preempted and ahead")
    _check(narrow, expected, "in chunks, two choices", num_choices=2)
    assert narrow.scheduler.counters.num_preemptions > 0, "nothing was preempted"
    outcome = TRANSFORMERS if identify(folder).switches is None else NATIVE
    if wide.info.attention_backend == ContextBackend.name:
        return Served(outcome, BY_REQUEST)
    return Served(outcome, "prefix cache" if is_found else "no prefix cache")


def _start(folder: Path, **options: int) -> Started:
    """Start the engine as the server does, in float32."""
    common = {"device": "cpu", "dtype": "float32", "kv_cache_memory": _CACHE_BYTES, "itl_target_ms": 60_000.0}
    return start(EngineOptions(model=str(folder), **common, **options), "test")  # type: ignore[arg-type]


@contextmanager
def _preempting() -> Iterator[None]:
    """Engines started meanwhile preempt every request but the oldest once."""
    with patch(f"{start.__module__}.{Scheduler.__name__}", PreemptingScheduler):
        yield


def _check(engine: Engine[LaunchedStep], expected: Golden, way: str, num_choices: int = 1) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS)
    adds = [
        AddRequest(TokensInput(prompt), params, num_choices=num_choices, request_id=number)
        for number, prompt in enumerate(expected.prompts)
    ]
    results = run(engine, adds)
    keys: Iterable[tuple[int, int]] = ((number, index) for number in range(len(adds)) for index in range(num_choices))
    for number, index in keys:
        right, given = expected.outputs[number], results[number, index].token_ids
        if given != right:
            length = len(expected.prompts[number])
            raise WrongAnswerError(f"{way}, prompt {number} of {length} tokens: {given} instead of {right}")
