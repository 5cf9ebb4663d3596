"""The OpenAI SDK, as published, against the real server and engine."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.end_to_end.conftest import LiveServer

MODEL = "demo"


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live_server.base_url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def ask(text: str) -> list[openai.types.chat.ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_models_are_listed_and_retrieved(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("org/unknown")
    assert error.value.code == "model_not_found"


def test_a_streamed_chat_equals_the_plain_one(client: openai.OpenAI, model: str) -> None:
    plain = client.chat.completions.create(model=model, messages=ask("Hello"), temperature=0, max_tokens=40)
    stream = client.chat.completions.create(
        model=model,
        messages=ask("Hello"),
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert plain.choices[0].finish_reason in ("stop", "length")


def test_logprobs_of_a_greedy_answer_are_those_of_the_best_ids(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=ask("What is 2 + 2?"), temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob >= token.top_logprobs[2].logprob
    assert b"".join(bytes(t.bytes or []) for t in content).decode() == answer.choices[0].message.content


def test_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI, model: str) -> None:
    def sample(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model=model, messages=ask("Tell me something"), n=4, seed=seed, temperature=2, max_tokens=12
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.message.content or "" for choice in answer.choices]

    first = sample(1)
    assert len(set(first)) > 1
    assert sample(1) == first
    assert sample(2) != first


def test_a_stop_string_never_shows(client: openai.OpenAI, model: str) -> None:
    letters: Any = {"structured_outputs": {"regex": "[a-z]{20}"}}
    asked: Any = {"model": model, "prompt": "Hello", "temperature": 0, "max_tokens": 24, "extra_body": letters}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[5:8]
    stream = client.completions.create(**asked, stop=[stop], stream=True)
    pieces = list(stream)
    assert "".join(piece.choices[0].text for piece in pieces) == whole[: whole.index(stop)]
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_completions_take_token_ids_and_lists_and_echo(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=[[5, 6, 7], [8, 9]], n=2, max_tokens=2, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
    scored = client.completions.create(model=model, prompt="Hello there", max_tokens=0, echo=True, logprobs=2)
    assert scored.choices[0].text == "Hello there"
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])


def test_errors_name_the_field_the_bound_and_the_value(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=model, messages=ask("x"), temperature=3)
    assert error.value.param == "temperature"
    assert "2" in error.value.message and "3" in error.value.message
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=model, prompt=[5] * 100_000, max_tokens=1)
    assert error.value.code == "context_length_exceeded"
    assert "100000" in error.value.message
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="unknown", messages=ask("x"))
    assert error.value.request_id
