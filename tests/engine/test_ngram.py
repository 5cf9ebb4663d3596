"""Prompt lookup changes nothing but the number of steps."""

import random
from pathlib import Path

import pytest

from tests.engine.fake_runner import make_engine
from tests.engine.requests_for_tests import add_request
from tests.engine.runs import run
from weft import server
from weft.engine.drafts import NgramDrafter
from weft.engine.kernels.cpu import library
from weft.engine.loop.engine import Engine
from weft.engine.start.startup import start
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, EngineOptions, Guidance
from weft.engine.wire.params import SamplingParams

pytestmark = pytest.mark.usefixtures("cheap_drafts")

DEMO = Path(server.__file__).parent / "demo_model"


def demo_engine(speculative: str | None) -> Engine:
    options = EngineOptions(
        model=str(DEMO), device="cpu", max_model_len=256, kv_cache_memory=3_000_000, speculative=speculative
    )
    return start(options, "epoch").engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_and_log_probabilities_are_those_of_plain_decoding_bit_for_bit(temperature: float) -> None:
    """The cache is small, so that some of the requests are preempted; half of them share a prefix, each has a loop."""
    if library.load() is None:
        pytest.skip("torch's layers compute a row differently beside other rows")
    generator = random.Random(3)
    loop = [generator.randrange(10, 400) for _ in range(12)] * 4
    params = SamplingParams(temperature=temperature, max_tokens=60, seed=5, logprobs=3, ignore_eos=True)
    prompts = [loop + [generator.randrange(10, 400) for _ in range(n)] for n in range(8)]
    adds = [
        AddRequest(TokensInput(prompt), params, num_choices=1 + n % 2, request_id=n) for n, prompt in enumerate(prompts)
    ]
    plain = run(demo_engine(None), adds)
    # The demo model answers briefly and says the same again: its answers are predictions of each other, too.
    predicted = tuple(i if n != 9 else i + 1 for n, i in enumerate(plain[0, 0].token_ids))  # one id of it is wrong
    guided = [
        AddRequest(
            a.input,
            params,
            a.num_choices,
            guidance=Guidance(None, predicted),
            request_id=a.request_id,
        )
        for a in adds[:4]
    ]
    engine = demo_engine("ngram")
    outputs = run(engine, guided + adds[4:])
    for key, output in plain.items():
        assert outputs[key].token_ids == output.token_ids
        assert outputs[key].logprobs == output.logprobs
    counters = engine.scheduler.counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    assert outputs[0, 0].num_accepted_predictions > 20
    assert outputs[5, 0].num_accepted_predictions == outputs[5, 0].num_rejected_predictions == 0


def test_an_answer_that_repeats_itself_takes_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.fake_runner.next_id", lambda context, *_: (context[-1] + 1) % 7)
    fake = make_engine(drafter=NgramDrafter())
    output = run(fake.engine, [add_request([1], max_tokens=60, temperature=0.0)])[0, 0]
    assert output.token_ids == [(2 + n) % 7 for n in range(60)]
    assert fake.engine.scheduler.counters.num_steps < 20
    assert output.num_accepted_predictions == 0  # nobody predicted anything
