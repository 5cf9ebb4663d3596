"""POST /v1/responses over a fake engine; every response and event is held against the SDK's own types."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.chat_templates_for_tests import QWEN3
from weft.engine.wire.messages import FinishReason
from weft.server.errors import EngineDiedError

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CODE: dict[str, Any] = {"type": "custom", "name": "code"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ö"}}\n</tool_call>'
CODE_CALL = '<tool_call>\n{"name": "code", "arguments": {"input": "1 + \\"1\\""}}\n</tool_call>'
THOUGHT = "<think>\nwell\n</think>\n\n"


@pytest.fixture
def thinker(make_site: Any) -> Any:
    site = make_site()
    site.tokenizer.template = QWEN3
    site.tokenizer.added_ids = {"<think>": 300, "</think>": 301}
    site.rebuild()
    return site


def ask(site: Any, **body: Any) -> Any:
    reply = site.call("POST", "/v1/responses", json={"input": "Hi", "store": False, **body})
    if reply.status == 200 and not body.get("stream"):
        Response.model_validate_json(reply.text, strict=True)
    return reply


def events_of(text: str) -> list[dict[str, Any]]:
    """Every event, after its framing, its number and its type have been checked."""
    events = []
    for number, frame in enumerate(frame for frame in text.split("\n\n") if frame):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        assert EVENT.validate_json(data.removeprefix("data: "), strict=True).type == event["type"]
        events.append(event)
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types without repeated deltas."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if not (name.endswith("delta") and names[i - 1] == name)]


def test_a_text_is_answered_with_a_message(site: Any) -> None:
    answer = ask(site, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5).json
    (message,) = answer["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hällo, wörld!", "annotations": [], "logprobs": []}]
    assert (answer["status"], message["status"]) == ("completed", "completed")
    assert (answer["metadata"], answer["temperature"], answer["instructions"]) == ({"a": "b"}, 0.5, "Be brief.")
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert answer["usage"]["output_tokens"] == len("Hällo, wörld!".encode()) + 1
    assert [(m["role"], m["content"]) for m in site.tokenizer.rendered] == [("system", "Be brief."), ("user", "Hi")]


TURN = ["output_item.added", "content_part.added"]
REASONING = [*TURN, "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"]
MESSAGE = [*TURN, "output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
FUNCTION = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]
CUSTOM = ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_events_come_in_order_and_make_up_the_response(thinker: Any, chunk: int) -> None:
    thinker.engine.answers, thinker.engine.chunk = [f"{THOUGHT}Look.\n{CALL}\n{CODE_CALL}"], chunk
    events = events_of(ask(thinker, stream=True, tools=[WEATHER, CODE]).text)
    order = ["created", "in_progress", *REASONING, *MESSAGE, *FUNCTION, *CUSTOM, "completed"]
    assert kinds(events) == order
    final = events[-1]["response"]
    done = {event["output_index"]: event["item"] for event in events if event["type"].endswith("output_item.done")}
    assert final["output"] == [done[i] for i in range(4)]
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == final["output"][event["output_index"]]["id"]
        if event["type"].endswith("output_item.added"):
            assert event["item"]["id"] == done[event["output_index"]]["id"]
            assert event["item"].get("call_id") == done[event["output_index"]].get("call_id")
    texts = ["".join(e["delta"] for e in events if "delta" in e and e["output_index"] == i) for i in range(4)]
    assert texts == ["well", "Look.", '{"city": "Ö"}', '1 + "1"']
    assert [final["output"][2]["arguments"], final["output"][3]["input"]] == texts[2:]
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_a_whole_response_has_the_items_of_a_stream(thinker: Any) -> None:
    thinker.engine.answers = [f"{THOUGHT}Look.\n{CALL}\n{CODE_CALL}"]
    whole = ask(thinker, tools=[WEATHER, CODE]).json["output"]
    streamed = events_of(ask(thinker, stream=True, tools=[WEATHER, CODE]).text)[-1]["response"]["output"]
    for item in [*whole, *streamed]:
        item["id"] = item["call_id"] = ""
    assert whole == streamed
    assert [item["type"] for item in whole] == ["reasoning", "message", "function_call", "custom_tool_call"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_cut_answer_is_incomplete(site: Any, is_stream: bool) -> None:
    reply = ask(site, max_output_tokens=3, stream=is_stream)
    final = events_of(reply.text)[-1]["response"] if is_stream else reply.json
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert final["output"][0]["status"] == "incomplete"
    if is_stream:
        assert events_of(reply.text)[-1]["type"] == "response.incomplete"


def test_a_cut_call_is_incomplete_and_still_done(thinker: Any) -> None:
    thinker.engine.answers, thinker.engine.finish = [CALL[:50]], FinishReason.LENGTH
    events = events_of(ask(thinker, tools=[WEATHER], stream=True).text)
    assert kinds(events) == ["created", "in_progress", *FUNCTION, "incomplete"]
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


def test_an_empty_answer_is_an_empty_message(site: Any) -> None:
    site.engine.answers = [""]
    assert ask(site).json["output"][0]["content"][0]["text"] == ""
    assert kinds(events_of(ask(site, stream=True).text)) == ["created", "in_progress", *MESSAGE, "completed"]


@pytest.mark.parametrize("num_read", [0, 3])
def test_a_failure_in_the_stream_is_a_failed_response(site: Any, num_read: int) -> None:
    site.engine.error, site.engine.error_after = EngineDiedError(), num_read
    events = events_of(ask(site, stream=True).text)
    last = events[-1]
    assert last["type"] == "response.failed"
    assert (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", "server_error")
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"] * bool(num_read)


def test_a_failure_of_a_whole_answer_is_a_status(site: Any) -> None:
    site.engine.error = EngineDiedError()
    assert ask(site).error["code"] == "engine_restarting"


def test_items_of_every_kind_become_messages(thinker: Any) -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}] * 2},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "b", "annotations": []}, {"type": "refusal", "refusal": "c"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Ö"}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "code", "input": "1"},
        {"type": "function_call_output", "call_id": "c1", "output": "warm"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    assert ask(thinker, input=items).headers.get("x-ignored-params") is None
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ö"}}},
        {"id": "c2", "type": "function", "function": {"name": "code", "arguments": {"input": "1"}}},
    ]
    assert thinker.tokenizer.rendered == [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "a\na"},
        {"role": "assistant", "content": "b\nc", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "warm", "tool_call_id": "c1"},
        {"role": "tool", "content": "2", "tool_call_id": "c2"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    ask(thinker, input=items, reasoning={"context": "current_turn"})
    assert "reasoning_content" not in thinker.tokenizer.rendered[2]


def test_a_response_comes_back_as_input(thinker: Any) -> None:
    thinker.engine.answers = [f"{THOUGHT}Look.\n{CALL}"]
    output = ask(thinker, tools=[WEATHER]).json["output"]
    answer = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "warm"}
    reply = ask(thinker, tools=[WEATHER], input=[{"role": "user", "content": "Hi"}, *output, answer])
    assert (reply.status, reply.headers.get("x-ignored-params")) == (200, None)
    turn = thinker.tokenizer.rendered[1]
    assert (turn["reasoning_content"], turn["content"], len(turn["tool_calls"])) == ("well", "Look.", 1)


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": []}, "input", "invalid_value"),
        ({"input": 3}, "input", "invalid_type"),
        ({"input": None}, "input", "invalid_value"),
        ({"input": [{"call_id": "x"}]}, "input[0].type", "unsupported_value"),
        (
            {"prompt_cache_options": {"comparison_response_id": "r"}},
            "prompt_cache_options.comparison_response_id",
            "unsupported_parameter",
        ),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "invalid_value"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "unsupported_value",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "invalid_value"),
        (
            {"input": [USER, {"type": "function_call_output", "call_id": "c", "output": ""}]},
            "input[1].call_id",
            "invalid_value",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_value"),
        (
            {"tools": [{**WEATHER, "parameters": {"type": "string"}, "strict": True}]},
            "tools[0].parameters",
            "invalid_json_schema",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice.type", "unsupported_value"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
            "invalid_value",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}},
            "text.format.schema",
            "invalid_json_schema",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_tool_calls": 0}, "max_tool_calls", "invalid_value"),
        ({"input": "x" * 2000}, "input", "context_length_exceeded"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"include": ["everything"]}, "include[0]", "invalid_value"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "invalid_value"),
        ({"temperature": 3.0}, "temperature", "invalid_value"),
        ({"metadata": {"a": 3}}, "metadata.a", "invalid_type"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    thinker: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    reply = ask(thinker, **fields)
    assert reply.status == 400
    assert (reply.error["param"], reply.error["code"]) == (param, code)
    assert not thinker.engine.asked


def test_fields_without_effect_are_reported(site: Any) -> None:
    reply = ask(site, user="u", reasoning={"summary": "auto", "effort": "low"}, text={"verbosity": "low"}, new=1)
    names = "new,user,text.verbosity,reasoning.summary,reasoning.effort"
    assert sorted(reply.headers["x-ignored-params"].split(",")) == sorted(names.split(","))
    assert ask(site, stream=True, stream_options={"include_obfuscation": False}).headers.get("x-ignored-params") is None


def test_logprobs_are_included_on_request(site: Any) -> None:
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    tokens = ask(site, **wanted).json["output"][0]["content"][0]["logprobs"]
    assert bytes(b for token in tokens for b in token["bytes"]).decode() == "Hällo, wörld!"
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)
    events = events_of(ask(site, stream=True, **wanted).text)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [token for delta in deltas for token in delta] == tokens
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == tokens


def test_structure_tools_and_choice_reach_the_grammar(thinker: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    thinker.engine.answers = ['{"a": 1}']
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}, "verbosity": "low"}
    assert ask(thinker, text=text).json["text"] == text
    assert '"integer"' in thinker.engine.asked[-1].guidance.grammar
    ask(thinker, text={"format": {"type": "json_object"}})
    assert "object" in thinker.engine.asked[-1].guidance.grammar
    thinker.engine.answers = [CODE_CALL]
    grammar = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "code"}]}
    answer = ask(thinker, tools=[WEATHER, {**CODE, "format": grammar}], tool_choice=allowed).json
    assert "[0-9]+" in thinker.engine.asked[-1].guidance.grammar
    assert "city" not in thinker.engine.asked[-1].guidance.grammar
    assert (answer["tool_choice"], answer["tools"][1]["format"]) == (allowed, grammar)
    assert [tool["function"]["name"] for tool in thinker.tokenizer.variables["tools"]] == ["weather", "code"]
    ask(thinker, tools=[WEATHER], tool_choice="none")
    assert "tools" not in thinker.tokenizer.variables


def test_auto_truncation_drops_the_oldest_turns(site: Any) -> None:
    items = [{"role": role, "content": f"{i} {'x' * 150}"} for i in range(6) for role in ("user", "assistant")]
    assert ask(site, input=items).error["code"] == "context_length_exceeded"
    assert ask(site, input=items, instructions="i", truncation="auto", max_output_tokens=50).status == 200
    kept = [message["content"].split()[0] for message in site.tokenizer.rendered]
    assert kept == ["i", "4", "4", "5", "5"] or kept == ["i", "3", "3", "4", "4", "5", "5"]
    alone = ask(site, input=[{"role": "user", "content": "x" * 3000}], truncation="auto")
    assert alone.error["code"] == "context_length_exceeded"


def test_auto_truncation_keeps_the_question_of_a_long_turn(site: Any) -> None:
    steps: list[dict[str, Any]] = [USER]
    for i in range(20):
        steps.append({"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"})
        steps.append({"type": "function_call_output", "call_id": f"c{i}", "output": "x" * 100})
    assert ask(site, input=steps, truncation="auto").status == 200
    first, second, third, *_ = site.tokenizer.rendered
    assert (first["role"], second["role"], third["role"]) == ("user", "assistant", "tool")
    assert site.tokenizer.rendered[-1]["tool_call_id"] == "c19"


def test_the_cache_is_used_as_asked(site: Any) -> None:
    part = {"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    options = {"mode": "explicit"}
    ask(site, input=[{"role": "user", "content": [part]}, USER], prompt_cache_options=options)
    (pin,) = site.engine.asked[0].caching.pins
    assert pin.ttl_s == 43200
    ask(site, prompt_cache_options=options)
    assert not site.engine.asked[1].caching.is_used
    warmed = ask(site, prompt_cache_options={"prewarm": True}).json
    assert (warmed["status"], warmed["output"]) == ("completed", [])
    assert site.engine.asked[2].params.max_tokens == 0
