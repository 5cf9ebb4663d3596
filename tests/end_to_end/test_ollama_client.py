"""Ollama's own Python client against a live server."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from ollama import ChatResponse, GenerateResponse
from pydantic import BaseModel, Field

from tests.end_to_end.conftest import LiveServer

ASK: Any = [{"role": "user", "content": "Hello"}]
MODEL = "weft-demo"


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[ollama.Client]:
    with ollama.Client(live_server.base_url, timeout=100) as client:
        yield client


def test_a_stream_of_lines_is_the_plain_answer(client: ollama.Client, live_server: LiveServer) -> None:
    options = {"temperature": 0, "num_predict": 20, "num_ctx": 512, "seed": 3}
    plain = client.chat(MODEL, ASK, options=options)
    parts = list(client.chat(MODEL, ASK, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == plain.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert 0 < (parts[-1].eval_count or 0) == (plain.eval_count or 0) <= 20
    assert parts[-1].done_reason == plain.done_reason == "stop"
    cut = client.chat(MODEL, ASK, options={**options, "num_predict": 3})
    assert (cut.eval_count, cut.done_reason) == (3, "length")
    last = parts[-1]
    assert (last.total_duration or 0) >= (last.eval_duration or 0) > 0
    body = {"model": MODEL, "messages": ASK, "options": options}
    reply = httpx.post(f"{live_server.base_url}/api/chat", json=body, timeout=100)
    assert reply.headers["content-type"] == "application/x-ndjson"
    for line in reply.text.splitlines():
        ChatResponse.model_validate({**json.loads(line)}, extra="forbid")


def test_a_prompt_is_answered_or_continued(client: ollama.Client) -> None:
    options = {"num_predict": 8}
    answered = client.generate(MODEL, "Hello", system="Be short.", options=options)
    assert answered.response
    assert isinstance(answered, GenerateResponse)
    raw = client.generate(MODEL, "Once upon", raw=True, options=options)
    assert (raw.prompt_eval_count or 0) < (answered.prompt_eval_count or 0)
    assert "".join(part.response or "" for part in client.generate(MODEL, "a", raw=True, stream=True, options=options))


@pytest.mark.parametrize("mode", [{"raw": True}, {"suffix": "the end"}], ids=str)
@pytest.mark.parametrize("field", [{"system": "Be short."}, {"think": True}, {"think": "low"}], ids=str)
def test_what_only_the_template_has_room_for_is_refused_without_it(
    client: ollama.Client, mode: dict[str, Any], field: dict[str, Any]
) -> None:
    """It was dropped without a word."""
    with pytest.raises(
        ollama.ResponseError, match=f"{next(iter(field))} cannot be used with {next(iter(mode))}"
    ) as caught:
        client.generate(MODEL, "Once upon", **mode, **field)
    assert caught.value.status_code == 400


def test_a_schema_is_followed(client: ollama.Client) -> None:
    answer = client.chat(MODEL, ASK, format=Person.model_json_schema())
    Person.model_validate_json(answer.message.content or "")
    cut = client.chat(MODEL, ASK, format="json", options={"num_predict": 10})  # an object may have any length
    assert (cut.message.content or "").startswith("{")


def test_a_conversation_with_a_tool(client: ollama.Client) -> None:
    """The demo model calls when only a call fits; a tool's turn has no id, and still belongs to its call."""

    def weather(city: str) -> str:
        """The weather.

        Args:
            city: Where.
        """
        return f"rain in {city}"

    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": weather("Rome"), "tool_name": "weather"},
    ]
    answer = client.chat(MODEL, messages, tools=[weather], options={"num_predict": 60})
    assert answer.message.content or answer.message.tool_calls
    for part in client.chat(MODEL, messages, tools=[weather], stream=True, options={"num_predict": 60}):
        assert isinstance(part, ChatResponse)


def test_models_and_versions(client: ollama.Client, live_server: LiveServer) -> None:
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    shown = client.show(MODEL)
    assert "tools" in (shown.capabilities or [])
    assert live_server.get("/api/version").json()["version"]
    assert client.chat(MODEL, []).done_reason == "load"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"options": {"temperature": -1}}, r"options\.temperature must be"),
        ({"options": {"num_ctx": 0}}, r"options\.num_ctx must be at least 1, got 0"),
        ({"options": {"mirostat": 1}}, r"options\.mirostat is not supported"),
        ({"options": {"num_predict": 0}}, r"options\.num_predict must be at least 1, got 0"),
        ({"options": {"stop": [""]}}, r"options\.stop\[0\] must not be empty"),
        (
            {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]},
            r"messages\[0\]\.images\[0\]: the model does not take parts of type 'image'",
        ),
    ],
)
def test_what_is_wrong_is_named_as_it_was_sent(client: ollama.Client, body: Any, message: str) -> None:
    with pytest.raises(ollama.ResponseError, match=message) as refused:
        client.chat(**{"model": MODEL, "messages": ASK, **body})
    assert refused.value.status_code == 400


def test_what_has_no_effect_is_reported(live_server: LiveServer) -> None:
    body = {"messages": ASK, "stream": False, "keep_alive": "5m", "options": {"num_thread": 4, "num_predict": 1}}
    reply = httpx.post(f"{live_server.base_url}/api/chat", json=body, timeout=100)
    assert reply.headers["x-ignored-params"] == "options.num_thread,keep_alive"
