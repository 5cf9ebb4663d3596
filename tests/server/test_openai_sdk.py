"""The OpenAI SDK against the live app over a fake engine."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from weft.engine.wire.messages import RejectReason
from weft.server.errors import EngineDiedError, rejection

MODEL = "org/fake model"
HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(site: Any) -> Iterator[openai.OpenAI]:
    with site.live() as base_url, openai.OpenAI(base_url=f"{base_url}/v1", api_key="k", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2, n=2)
    assert [choice.message.content for choice in answer.choices] == ["Hällo, wörld!"] * 2
    assert answer.choices[0].finish_reason == "stop"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert bytes(b for entry in logprobs.content for b in entry.bytes or []).decode() == "Hällo, wörld!"
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer._request_id is not None and answer._request_id.startswith("req_")


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}, stop=["ld"], seed=1
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hällo, wör"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("Hällo, wörld".encode())


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HI) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "Hällo, wörld!"


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1, echo=True, max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["aH\ufffd", "bH\ufffd"]
    assert answer.choices[0].finish_reason == "length"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.text_offset == [0, 0, 1, 2]


def test_completions_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="a", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hällo, wörld!"


def test_extensions_in_extra_body(client: openai.OpenAI, site: Any) -> None:
    client.chat.completions.create(model=MODEL, messages=HI, extra_body={"top_k": 5, "cache_salt": "s"})
    assert site.engine.asked[0].params.top_k == 5
    assert site.engine.asked[0].deadline is not None


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=3)
    assert (caught.value.code, caught.value.param, caught.value.type) == (
        *("invalid_value", "temperature"),
        "invalid_request_error",
    )
    assert caught.value.request_id is not None
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HI, web_search_options={})
    assert caught.value.code == "unsupported_parameter"


def test_an_error_in_a_stream(client: openai.OpenAI, site: Any) -> None:
    site.engine.error, site.engine.error_after = EngineDiedError(), 3
    received = []
    with pytest.raises(openai.APIError) as caught:
        for chunk in client.chat.completions.create(model=MODEL, messages=HI, stream=True):
            received.append(chunk)
    assert received
    assert caught.value.code == "engine_restarting"


@pytest.mark.parametrize(("reason", "num_tries"), [(RejectReason.POISON, 1), (RejectReason.QUEUE_FULL, 2)])
def test_only_what_may_succeed_is_tried_again(
    site: Any, monkeypatch: pytest.MonkeyPatch, reason: RejectReason, num_tries: int
) -> None:
    tries: list[None] = []

    async def generate(request: Any) -> Any:
        tries.append(None)
        raise rejection(reason, "m")

    site.engine.generate = generate
    with site.live() as base_url, openai.OpenAI(base_url=f"{base_url}/v1", api_key="k", max_retries=1) as client:
        monkeypatch.setattr(client, "_sleep_for_retry", lambda **how: None)
        with pytest.raises(openai.APIStatusError):
            client.completions.create(model=MODEL, prompt="a")
    assert len(tries) == num_tries


def test_with_a_key(make_site: Any) -> None:
    with make_site(api_key=("right",)).live() as base_url:
        with openai.OpenAI(base_url=f"{base_url}/v1", api_key="right") as client:
            assert len(client.models.list().data) == 2
        with openai.OpenAI(base_url=f"{base_url}/v1", api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                client.models.list()
            assert caught.value.code == "invalid_api_key"
