"""The executor's seam holds: the model may run in another process."""

from collections.abc import Iterator

import pytest

from tests.engine.guidance.demo import DEMO_MODEL, PROMPT, guided, json_grammar
from tests.engine.process_executor import ProcessExecutor
from tests.engine.requests_for_tests import add_request
from weft.engine.loop.engine import Engine
from weft.engine.start.startup import start
from weft.engine.wire.messages import AddRequest, EngineOptions, TokenLogprobs

OPTIONS = EngineOptions(model=str(DEMO_MODEL), device="cpu", max_num_batched_tokens=64, max_num_seqs=4)
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
REQUESTS = (
    add_request(PROMPT, 0, num_choices=3, temperature=1.0, seed=3),
    add_request(PROMPT + PROMPT * 12, 1, temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=1),
    guided(add_request(PROMPT, 2, max_tokens=24, temperature=1.0, seed=5), json_grammar(SCHEMA)),
    add_request(PROMPT, 3, temperature=0.0, logprobs=2, prompt_logprobs=1, bad_words_token_ids=((40, 41),)),
    add_request(PROMPT[:5], 4, temperature=0.0, logit_bias={7: 5.0}),
)


@pytest.fixture
def other_process() -> Iterator[ProcessExecutor]:
    executor = ProcessExecutor(OPTIONS)
    yield executor
    executor.close()


def outputs(engine: "Engine[object]", adds: tuple[AddRequest, ...]) -> dict[tuple[int, int], list[int | TokenLogprobs]]:
    """What every choice gained: its ids, and log-probabilities where there are any."""
    gained: dict[tuple[int, int], list[int | TokenLogprobs]] = {}
    for add in adds:
        engine.add(0, add)
    while engine.has_work:
        engine.take_ready()
        for _, output in engine.step():
            entry = gained.setdefault((output.request_id, output.index), [])
            entry += [*output.token_ids, *(output.logprobs or []), *(output.prompt_logprobs or [])]
        engine.scheduler.check_integrity()
    return gained


@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_in_another_process_gives_the_same_ids(other_process: ProcessExecutor, overlap: bool) -> None:
    """Batches, masks and results cross as bytes; with overlap, a step is sent before the one before it is back."""
    engine = start(OPTIONS, "epoch").engine
    expected = outputs(engine, REQUESTS)
    assert len(expected) == 7
    remote = start(OPTIONS, "epoch").engine
    remote._executor = other_process  # type: ignore[assignment]
    remote._overlap = overlap
    assert outputs(remote, REQUESTS) == expected
    assert other_process.num_launched > 16
