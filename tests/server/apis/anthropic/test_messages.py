"""POST /v1/messages over a fake engine: what becomes of each part of a body, and what is refused."""

import json
from typing import Any

import pytest

from tests.chat_templates_for_tests import QWEN3
from weft.engine.wire.messages import FinishReason

ASK: Any = [{"role": "user", "content": "Hi"}]


def send(site: Any, path: str = "/v1/messages", **body: Any) -> Any:
    return site.call("POST", path, json={"max_tokens": 9, "messages": ASK, **body})


def rendered(site: Any, **body: Any) -> Any:
    assert send(site, **body).status == 200
    return [{**message} for message in site.tokenizer.rendered]


def refusal(site: Any, **body: Any) -> str:
    reply = send(site, **body)
    assert (reply.status, reply.json["type"], reply.json["error"]["type"]) == (400, "error", "invalid_request_error")
    assert reply.json["request_id"] == reply.headers["request-id"]
    return str(reply.json["error"]["message"])


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def test_blocks_become_messages(site: Any) -> None:
    calls = [
        {"type": "tool_use", "id": f"toolu_{i}", "name": "weather", "input": {"city": "Rome"}} for i in range(1, 4)
    ]
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("rain")]},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no", "is_error": True},
        {"type": "tool_result", "tool_use_id": "toolu_3"},
        text("And now?"),
    ]
    turns = [
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": [thought, text("I look."), *calls]},
        {"role": "user", "content": results},
    ]
    shown = rendered(site, system=[text("Be"), text("short.")], messages=turns)
    assert [(message["role"], message["content"]) for message in shown] == [
        ("system", "Be\nshort."),
        ("user", "a\nb"),
        ("assistant", "I look."),
        ("tool", "rain"),
        ("tool", "Error: no"),
        ("tool", ""),
        ("user", "And now?"),
    ]
    assert shown[2]["reasoning_content"] == "Hm."
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    made = [{"id": f"toolu_{i}", "type": "function", "function": function} for i in range(1, 4)]
    assert shown[2]["tool_calls"] == made
    assert [message.get("tool_call_id") for message in shown[3:6]] == ["toolu_1", "toolu_2", "toolu_3"]


def test_a_last_turn_of_the_assistant_is_continued(site: Any) -> None:
    send(site, messages=[*ASK, {"role": "assistant", "content": "Hello"}])
    assert bytes(site.engine.asked[-1].input.token_ids[1:]) == b"user: Hi\nassistant: Hello"


def test_sampling_reaches_the_engine(site: Any) -> None:
    send(site, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=[], service_tier="auto", metadata={"user_id": "u"})
    params = site.engine.asked[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 9)
    assert site.engine.asked[-1].tenant


def test_breakpoints_are_pins_with_their_time(site: Any) -> None:
    def mark(ttl: str | None = None) -> dict[str, Any]:
        return {"cache_control": {"type": "ephemeral", "ttl": ttl}}

    send(site, system=[text("abc", **mark("1h"))], messages=[{"role": "user", "content": [text("de", **mark())]}])
    pins = site.engine.asked[-1].caching.pins
    prompt = "system: abc\nuser: de\nassistant:"
    assert [(pin.num_tokens, pin.ttl_s) for pin in pins] == [
        (1 + prompt.index("abc") + 3, 3600.0),
        (1 + prompt.index("de") + 2, 300.0),
    ]
    send(site, cache_control={"type": "ephemeral"})
    assert [(pin.num_tokens, pin.ttl_s) for pin in site.engine.asked[-1].caching.pins] == [(1 + len("user: Hi"), 300.0)]
    assert "cache_control must be between 0 and 4, got 5" in refusal(
        site, messages=[{"role": "user", "content": [text("a", **mark()) for _ in range(5)]}]
    )


def test_more_output_than_the_context_holds_is_cut_there(site: Any) -> None:
    send(site, max_tokens=32_000)
    request = site.engine.asked[-1]
    assert request.params.max_tokens == 1000 - len(request.input.token_ids)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": 1.5}, "temperature must be between 0 and 1, got 1.5"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 2}, "top_p must be"),
        ({"messages": []}, "messages: list should have at least 1 item"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]: the model does not",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_9"}]}]},
            "messages[0].content[0].tool_use_id must be the id of an earlier tool_use, got 'toolu_9'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "blocks of type 'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "'thinking' cannot stand here"),
        ({"stop_sequences": [""]}, "stop_sequences[0] must not be empty"),
        (
            {"tools": [{"name": "a", "input_schema": {"type": "string"}, "strict": True}]},
            "tools[0].input_schema.type must allow an object",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens must be at least 1, got 0"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers is not supported"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "output_config.format.schema"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_sent(site: Any, body: Any, message: str) -> None:
    assert message in refusal(site, **body)


def test_a_thread_is_refused_so_that_the_sdk_sends_everything(site: Any) -> None:
    reply = send(site, thread={"type": "continue", "previous_message_id": "msg_1"}, tool_choice={"type": "any"})
    assert (reply.status, reply.json["error"]["details"]) == (400, {"error_code": "thread_unsupported_request"})


def test_what_has_no_effect_is_reported(site: Any) -> None:
    reply = send(site, thinking={"type": "enabled", "budget_tokens": 5}, metadata={"user_id": "u"}, speed="fast")
    assert reply.headers["x-ignored-params"] == "speed,metadata,thinking.budget_tokens,thinking"
    assert send(site, output_config={"effort": "low"}).headers["x-ignored-params"] == "output_config.effort"


def test_a_stop_sequence_is_named(site: Any) -> None:
    site.engine.answers = ["one two three"]
    reply = send(site, stop_sequences=["two"], max_tokens=99).json
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "two")
    assert reply["content"] == [{"type": "text", "text": "one ", "citations": None}]


def test_a_failure_in_a_stream_is_its_last_event(site: Any) -> None:
    site.engine.finish = FinishReason.ERROR
    *_, last = send(site, stream=True).text.removesuffix("\n\n").split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


def test_tokens_are_counted(site: Any) -> None:
    counted = send(site, "/v1/messages/count_tokens", system="Be short.", max_tokens=None)
    assert counted.json == {"input_tokens": 1 + len("system: Be short.\nuser: Hi\nassistant:")}


def test_an_empty_list_of_tools_is_none(site: Any) -> None:
    """Coding agents send one with their request for a title."""
    assert send(site, tools=[], tool_choice={"type": "auto"}).status == 200


@pytest.mark.parametrize("depth", [100, 1000, 20_000])
def test_blocks_inside_blocks_are_refused(site: Any, depth: int) -> None:
    nested: str = '{"type":"tool_result","tool_use_id":"a","content":[' * depth + "]}" * depth
    body = '{"max_tokens":9,"messages":[{"role":"user","content":[' + nested + "]}]}"
    reply = site.call("POST", "/v1/messages", content=body, headers={"content-type": "application/json"})
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("more", [{}, {"description": "d"}, {"input_schema": None}, {"input_schema": {}},
                                  {"type": "custom"}, {"type": "custom", "strict": False}])  # fmt: skip
def test_a_tool_without_a_schema_takes_no_arguments(site: Any, more: dict[str, Any]) -> None:
    tools = [{"name": "a", **more}]
    site.tokenizer.template = QWEN3
    site.rebuild()
    reply = send(site, tools=tools)
    assert reply.status == 200, reply.text
    assert 'arguments_0: "{}"' in site.engine.asked[-1].guidance.grammar.replace("\\", "")
