"""Predicted outputs and speculation change how many steps an answer takes, and nothing else."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.end_to_end.conftest import LiveServer, Serve

NUM_TOKENS = 48
NUM_TRIES = 8
"""Of what is drafted only while the steps before were as long as this machine makes them when nobody disturbs it."""

TEXTS = ["What is 3 plus 4?", "1 2 3 1 2 3 1 2 3", "Count to twenty"]
LONG_TEXT = {"type": "object", "properties": {"text": {"type": "string", "minLength": 60}}, "required": ["text"]}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "extra_body": {"ignore_eos": True}},
    "sampled": {"temperature": 1.3, "extra_body": {"ignore_eos": True}},
    "schema": {
        "temperature": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": LONG_TEXT}},
    },
}
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live_server.base_url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def settings(way: str, text: str = TEXTS[-1]) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "weft-demo", "messages": messages, "max_tokens": NUM_TOKENS, "seed": 3, **WAYS[way]}


def ask(
    client: openai.OpenAI, server: LiveServer, way: str, prediction: str | None = None
) -> tuple[str, int, int, int]:
    """The text, the accepted and rejected tokens of the prediction, the steps that the engine took."""
    given: dict[str, Any] = {} if prediction is None else {"prediction": {"type": "content", "content": prediction}}
    before = server.metric("weft:engine_steps_total")
    answer = client.chat.completions.create(**settings(way), **given)
    num_steps = int(server.metric("weft:engine_steps_total") - before)
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    details = answer.usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted is not None and rejected is not None
    return answer.choices[0].message.content or "", accepted, rejected, num_steps


@every_way
def test_a_prediction_that_holds_saves_steps_and_changes_nothing(
    client: openai.OpenAI, live_server: LiveServer, way: str
) -> None:
    text, *counts, num_steps = ask(client, live_server, way)
    assert counts == [0, 0]

    def saves_steps() -> bool:
        predicted, accepted, _, num_predicted_steps = ask(client, live_server, way, text)
        assert predicted == text
        return accepted > 0 and num_predicted_steps < num_steps

    assert any(saves_steps() for _ in range(NUM_TRIES))


@every_way
def test_a_prediction_that_does_not_hold_changes_nothing(
    client: openai.OpenAI, live_server: LiveServer, way: str
) -> None:
    text = ask(client, live_server, way)[0]
    useless, accepted, *_ = ask(client, live_server, way, "Quite another story, about whales. " * 4)
    assert useless == text
    assert accepted < NUM_TOKENS / 4


def test_a_streamed_answer_counts_its_prediction(client: openai.OpenAI, live_server: LiveServer) -> None:
    text = ask(client, live_server, "greedy")[0]
    prediction: Any = {"type": "content", "content": text}

    def num_accepted() -> int:
        chunks = list(
            client.chat.completions.create(
                **settings("greedy"), prediction=prediction, stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        usage = chunks[-1].usage
        assert usage is not None and usage.completion_tokens_details is not None
        return usage.completion_tokens_details.accepted_prediction_tokens or 0

    assert any(num_accepted() > 0 for _ in range(NUM_TRIES))


def test_ngram_speculation_gives_the_same_answers(client: openai.OpenAI, serve: Serve) -> None:
    server = serve("--dtype", "float32", "--speculative", "ngram")
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as speculative:
        for way in WAYS:
            for text in TEXTS:
                asked = settings(way, text)
                expected = client.chat.completions.create(**asked).choices[0].message.content
                assert speculative.chat.completions.create(**asked).choices[0].message.content == expected, (way, text)
    assert server.metric("weft:spec_decode_num_accepted_tokens_total") > 0
