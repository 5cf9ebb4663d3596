"""Whatever is predicted, the answer is that of plain decoding."""

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.fake_runner import VOCAB_SIZE, FakeEngine, make_engine
from tests.engine.requests_for_tests import add_request
from tests.engine.runs import ids, run
from weft.engine.drafts import PredictionDrafter
from weft.engine.wire.messages import AddRequest, Guidance

pytestmark = pytest.mark.usefixtures("cheap_drafts")

KINDS = ("right", "half right", "wrong", "empty", "longer", "shifted")


def predict(kind: str, answer: Sequence[int], generator: random.Random) -> list[int]:
    noise = [generator.randrange(VOCAB_SIZE) for _ in answer]
    half = [new if generator.random() < 0.2 else old for old, new in zip(answer, noise, strict=True)]
    return {
        "right": list(answer),
        "half right": half,
        "wrong": noise,
        "empty": [],
        "longer": [*answer, *noise],
        "shifted": [*noise[:3], *answer],
    }[kind]


def guided(add: AddRequest, prediction: Sequence[int]) -> AddRequest:
    return msgspec.structs.replace(add, guidance=Guidance(prediction_token_ids=tuple(prediction)))


def engine(**options: object) -> FakeEngine:
    return make_engine(drafter=PredictionDrafter(), eos_token_ids=(11,), **options)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    temperature=st.sampled_from([0.0, 1.0]),
    num_choices=st.integers(1, 3),
    seed=st.integers(0, 1 << 20),
    options=st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([1, 2, 4]),
            "num_blocks": st.integers(45, 60),
            "max_num_batched_tokens": st.sampled_from([12, 64]),
            "prefix_caching": st.booleans(),
            "windows": st.sampled_from([(None,), (6,), (None, 5)]),
            "overlap": st.booleans(),
        }
    ),
)
def test_ids_are_those_of_plain_decoding(
    kinds: list[str], temperature: float, num_choices: int, seed: int, options: dict[str, object]
) -> None:
    generator = random.Random(seed)
    shared = [generator.randrange(3) for _ in range(6)]
    adds = [
        add_request(
            shared + [generator.randrange(3) for _ in range(generator.randrange(1, 6))],
            number,
            max_tokens=generator.randrange(1, 25),
            num_choices=num_choices,
            temperature=temperature,
            seed=number,
        )
        for number in range(len(kinds))
    ]
    plain = run(engine(**options).engine, adds)
    predictions = [predict(kind, plain[n, 0].token_ids, generator) for n, kind in enumerate(kinds)]
    fake = engine(**options)
    outputs = run(fake.engine, list(map(guided, adds, predictions)))
    assert ids(outputs) == ids(plain)
    counters = fake.engine.scheduler.counters
    num_accepted = sum(output.num_accepted_predictions for output in outputs.values())
    num_rejected = sum(output.num_rejected_predictions for output in outputs.values())
    assert (counters.num_accepted_tokens, counters.num_draft_tokens) == (num_accepted, num_accepted + num_rejected)
    for pool in fake.engine.scheduler.kv.pools:
        assert pool.num_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_right_prediction_saves_steps_and_is_counted(overlap: bool) -> None:
    add = add_request([1, 2, 3], max_tokens=40, temperature=1.0, seed=4, ignore_eos=True)
    plain = engine(overlap=overlap)
    answer = run(plain.engine, [add])[0, 0].token_ids
    fake = engine(overlap=overlap)
    output = run(fake.engine, [guided(add, answer)])[0, 0]
    assert output.token_ids == answer
    assert fake.engine.scheduler.counters.num_steps < plain.engine.scheduler.counters.num_steps / 3
    # Every step adds an id of its own to those that were accepted.
    assert output.num_accepted_predictions == 40 - fake.engine.scheduler.counters.num_steps
    assert output.num_rejected_predictions == 0


def test_a_wrong_prediction_is_tried_once_and_counted() -> None:
    """No two of its ids occur in the answer behind each other, so that it is never found again."""
    add = add_request([1, 2, 3], max_tokens=30, temperature=0.0, ignore_eos=True)
    answer = run(engine().engine, [add])[0, 0].token_ids
    wrong = next(i for i in range(VOCAB_SIZE) if i not in answer)
    fake = engine()
    output = run(fake.engine, [guided(add, [answer[0]] + [wrong] * 50)])[0, 0]
    assert output.token_ids == answer
    assert output.num_accepted_predictions == 0
    assert output.num_rejected_predictions == fake.engine.scheduler.counters.num_draft_tokens > 0
    assert fake.engine.scheduler.counters.num_drafts == 1
    assert fake.engine.scheduler.counters.num_steps == 30


def test_every_choice_has_a_pointer_of_its_own() -> None:
    """The second choice says something else, so the first one's place in the prediction would not help it."""
    add = add_request([1, 2, 3], max_tokens=30, num_choices=2, temperature=1.0, seed=9, ignore_eos=True)
    answers = run(engine().engine, [add])
    assert answers[0, 0].token_ids != answers[0, 1].token_ids
    fake = engine()
    both = [*answers[0, 0].token_ids, *answers[0, 1].token_ids]
    outputs = run(fake.engine, [guided(add, both)])
    assert ids(outputs) == ids(answers)
    assert all(output.num_accepted_predictions > 15 for output in outputs.values())


def test_plain_requests_stay_overlapped_beside_one_with_a_prediction() -> None:
    plain = add_request([5, 5, 5], 1, max_tokens=30, temperature=0.0, ignore_eos=True)
    add = add_request([1, 2, 3], 2, max_tokens=30, temperature=0.0, ignore_eos=True)
    alone = engine(overlap=True)
    expected = ids(run(alone.engine, [plain])) | ids(run(engine().engine, [add]))
    fake = engine(overlap=True)
    assert ids(run(fake.engine, [plain, guided(add, expected[2, 0])])) == expected
    assert fake.engine.scheduler.counters.num_steps == alone.engine.scheduler.counters.num_steps
    assert fake.engine.scheduler.counters.num_accepted_tokens > 15
