"""The anthropic SDK against a live server: everything parses strictly, streams come in order, tools are called."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.end_to_end.conftest import LiveServer

SETTINGS: Any = {"model": "weft-demo", "max_tokens": 40, "messages": [{"role": "user", "content": "Hello"}]}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live_server.base_url, api_key="none", max_retries=0) as sdk:
        yield sdk


def sent_events(server: LiveServer, **body: Any) -> list[Any]:
    """The events of a stream as they come, each name checked against its data, each strictly parsed."""
    url = f"{server.base_url}/v1/messages"
    reply = httpx.post(url, json={**SETTINGS, **body, "stream": True}, timeout=100)
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    events = []
    for block in reply.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event, strict=False)
        events.append(event)
    return events


def check_order(events: list[Any]) -> list[Any]:
    """Blocks follow each other without a gap inside the message; returns how they began."""
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    begun: list[Any] = []
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(begun)
                begun.append(event["content_block"])
                is_open = True
            case kind:
                assert is_open
                assert event["index"] == len(begun) - 1
                is_open = kind == "content_block_delta"
    assert not is_open
    return begun


def test_a_message_parses_strictly(client: anthropic.Anthropic) -> None:
    raw = client.messages.with_raw_response.create(**SETTINGS)
    message = raw.parse()
    Message.model_validate(json.loads(raw.text()), strict=False, extra="forbid")
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.content[0].type == "text"
    usage = message.usage
    read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    counted = client.messages.count_tokens(model="weft-demo", messages=SETTINGS["messages"])
    assert counted.input_tokens == usage.input_tokens + read + written


def test_a_stream_is_the_plain_answer(client: anthropic.Anthropic, live_server: LiveServer) -> None:
    system: Any = [{"type": "text", "text": "Be short."}]
    body = {"system": system, "temperature": 0.0}
    sdk_body: Any = {"system": system, "extra_body": {"temperature": 0.0}}  # which its signature lacks
    plain = client.messages.create(**SETTINGS, **sdk_body)
    assert check_order(sent_events(live_server, **body)) == [{"type": "text", "text": "", "citations": None}]
    with client.messages.stream(**SETTINGS, **sdk_body) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in plain.content]
    assert streamed.stop_reason == plain.stop_reason
    assert streamed.usage.output_tokens == plain.usage.output_tokens


def test_a_forced_call_comes_in_pieces_and_whole(client: anthropic.Anthropic, live_server: LiveServer) -> None:
    body = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 300}
    events = sent_events(live_server, **body)
    (begun,) = [block for block in check_order(events) if block["type"] == "tool_use"]
    assert (begun["name"], begun["input"]) == ("weather", {})
    pieces = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    assert set(json.loads("".join(pieces))) == {"city"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    whole = client.messages.create(**{**SETTINGS, **body})
    assert whole.stop_reason == "tool_use"
    assert whole.content[-1].type == "tool_use"
    assert whole.content[-1].id.startswith("toolu_")


def test_the_sdks_tool_runner_holds_a_conversation(client: anthropic.Anthropic) -> None:
    """The first turn must call; what the tool says comes back in the second, which ends the conversation."""
    asked: list[str] = []

    @anthropic.beta_tool(input_schema=WEATHER["input_schema"])
    def weather(city: str) -> str:
        """The weather of a place."""
        asked.append(city)
        return f"It rains in {city}"

    # It asks for a thread first, is told that there are none, and then sends the whole conversation itself.
    runner = client.beta.messages.tool_runner(
        **{**SETTINGS, "max_tokens": 300}, tools=[weather], tool_choice={"type": "any"}, max_iterations=2
    )
    messages = list(runner)
    assert len(messages) == 2
    assert asked
    assert messages[0].stop_reason == "tool_use"


def test_a_json_schema_is_followed(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    message = client.messages.create(**SETTINGS, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert message.content[0].type == "text"
    assert 0 <= json.loads(message.content[0].text)["age"] <= 99


def test_a_cached_beginning_is_read(client: anthropic.Anthropic) -> None:
    """A breakpoint after a long system prompt: the second request reads what the first wrote."""
    text = "These are the rules of the house. " * 40
    system: Any = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    first = client.messages.create(**SETTINGS, system=system).usage
    second = client.messages.create(**SETTINGS, system=system).usage
    assert (first.cache_creation_input_tokens or 0) > 100
    assert (second.cache_read_input_tokens or 0) >= (first.cache_creation_input_tokens or 0) - 16


def test_output_beyond_the_context_is_cut_there(client: anthropic.Anthropic) -> None:
    """Coding agents ask for more output than a small model has room for."""
    body = {**SETTINGS, "max_tokens": 10_000_000, "stop_sequences": ["e"]}
    assert client.with_options(timeout=100).messages.create(**body).stop_reason in ("stop_sequence", "end_turn")


def test_errors_are_the_sdks_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**SETTINGS, "model": "nobody"})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be at least 1, got 0"):
        client.messages.create(**{**SETTINGS, "max_tokens": 0})


def test_models_are_listed_in_anthropics_way(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["weft-demo"]
    assert client.models.retrieve("weft-demo").lifecycle == "active"
