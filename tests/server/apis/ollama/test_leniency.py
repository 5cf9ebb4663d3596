"""What clients of Ollama send and Ollama takes, though it is not what the documentation says."""

from typing import Any
from unittest.mock import ANY

import pytest

from tests.chat_templates_for_tests import QWEN3
from tests.server.conftest import MAX_MODEL_LEN

USER = {"role": "user", "content": "Hi"}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {"name": "f", "description": "d", "parameters": WEATHER}


def chat(site: Any, **body: Any) -> Any:
    return site.call("POST", "/api/chat", json={"messages": [USER], "stream": False, **body})


@pytest.fixture
def able(site: Any) -> Any:
    site.tokenizer.template = QWEN3
    site.rebuild()
    return site


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ({"function": {"name": "f"}}, {}),
        ({"function": {"name": "f", "arguments": None}}, {}),
        ({"function": {"index": 0, "name": "f", "arguments": {"a": 1}}}, {"a": 1}),
        ({"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}, {}),
        ({"function": {"name": "f", "arguments": '{"a":1}'}}, {"a": 1}),
        ({"function": {"name": "f", "arguments": ""}}, {}),
        ({"function": {"name": "f", "arguments": '{"a'}}, ANY),
        ({"function": {"name": "f", "arguments": [1]}}, ANY),
        ({"function": {"name": "f", "arguments": 5}}, ANY),
    ],
)
def test_an_earlier_call_may_have_any_arguments(able: Any, call: Any, arguments: Any) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "done", "tool_name": "f"}
    assert chat(able, messages=[USER, turn, result]).status == 200
    assert able.tokenizer.rendered[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    "tool",
    [
        {"function": FUNCTION},
        {"type": None, "function": FUNCTION},
        {"type": "", "function": FUNCTION},
        {"type": "function", "function": {**FUNCTION, "parameters": {**WEATHER, "required": None}}},
        {"function": {**FUNCTION, "parameters": None}},
    ],
)
def test_a_tool_may_lack_its_type_and_what_it_requires(able: Any, tool: Any) -> None:
    assert chat(able, tools=[tool]).status == 200
    (shown,) = able.tokenizer.variables["tools"]
    assert (shown["type"], shown["function"]["name"]) == ("function", "f")
    assert (shown["function"].get("parameters") or {}).get("required", []) is not None


@pytest.mark.parametrize("tool", [3, "f", {"function": 3}, {"type": "function"}])
def test_what_is_no_tool_is_refused(able: Any, tool: Any) -> None:
    assert chat(able, tools=[tool]).status == 400


def test_integers_may_be_whole_floats(site: Any) -> None:
    options = {"num_predict": 10.0, "top_k": 40.0, "seed": 1.0, "num_ctx": 500.0}
    assert chat(site, options=options).status == 200
    body = {"prompt": "Hi", "stream": False, "options": options}
    assert site.call("POST", "/api/generate", json=body).status == 200
    for request in site.engine.asked:
        params = request.params
        assert (params.max_tokens, params.top_k, params.seed) == (10, 40, 1)
        assert all(type(value) is int for value in (params.max_tokens, params.top_k, params.seed))


@pytest.mark.parametrize("option", ["num_predict", "top_k", "seed", "num_ctx"])
@pytest.mark.parametrize("value", [10.5, "10", True, [10]])
def test_what_is_no_whole_number_is_refused(site: Any, option: str, value: Any) -> None:
    reply = chat(site, options={option: value})
    assert reply.status == 400
    assert f"options.{option}" in reply.json["error"]


@pytest.mark.parametrize("value", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 131072, 131072.0])
def test_a_longer_context_than_there_is_is_cut_and_reported(make_site: Any, value: float) -> None:
    is_longer = value > MAX_MODEL_LEN
    for strict in (False, True):
        for path, body in (("/api/chat", {"messages": [USER]}), ("/api/generate", {"prompt": "Hi"})):
            whole = {**body, "stream": False, "options": {"num_ctx": value}}
            reply = make_site(strict_params=strict).call("POST", path, json=whole)
            assert reply.status == (400 if strict and is_longer else 200)
            if not strict:
                assert reply.headers.get("x-ignored-params") == ("options.num_ctx" if is_longer else None)


FORMATS: list[tuple[Any, str | None]] = [
    # a format, and what is reported of it
    (WEATHER, None),
    ({**WEATHER, "type": "OBJECT"}, None),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": WEATHER}}, None),
    ({"schema": WEATHER}, None),
    ({**WEATHER, "required": 5}, "format.required"),
    ({**WEATHER, "$ref": "#/nowhere"}, "format.$ref"),
    ({"properties": {**WEATHER["properties"], "a": {"type": "intt"}}}, "format.properties.a.type"),
    ({"properties": {**WEATHER["properties"], "a": {"enum": []}}}, "format.properties.a.enum"),
    ({**WEATHER, "minProperties": 5, "maxProperties": 2}, "format.minProperties,format.maxProperties"),
    ({"json_schema": {"strict": False, "schema": {**WEATHER, "required": 5}}}, "format.required"),
]


@pytest.mark.parametrize(("format", "lost"), FORMATS)
def test_a_format_is_as_loose_as_the_schema_of_a_tool(site: Any, format: Any, lost: str | None) -> None:
    """One wrong keyword ended the request, where that of a tool was left out."""
    reply = chat(site, format=format)
    assert (reply.status, reply.headers.get("x-ignored-params")) == (200, lost), reply.text
    assert '"city": {"type": "string"}' in site.engine.asked[-1].guidance.grammar
    body = {"prompt": "Hi", "stream": False, "format": format}
    assert site.call("POST", "/api/generate", json=body).headers.get("x-ignored-params") == lost


@pytest.mark.parametrize(
    "format", ["json", {}, {"type": "any"}, {"type": "json_object"}, {"type": ["any"]}, {"type": [{}]}, {"type": {}}]
)
def test_any_json(site: Any, format: Any) -> None:
    assert chat(site, format=format).status == 200
    assert "json" in site.engine.asked[-1].guidance.grammar


@pytest.mark.parametrize("format", ["", None, "text"])
def test_no_format(site: Any, format: Any) -> None:
    assert chat(site, format=format).status == 200
    assert not site.engine.asked[-1].guidance.grammar


@pytest.mark.parametrize("format", ["xml", [], 5, True])
def test_what_is_no_format_is_refused(site: Any, format: Any) -> None:
    reply = chat(site, format=format)
    assert reply.status == 400
    assert reply.json["error"].startswith("format: input should be '' or 'json', or a JSON schema, got ")


@pytest.mark.parametrize("turn", [{"thinking": "hm"}, {"reasoning_content": "hm"}, {"thinking": {"text": "hm"}}])
def test_reasoning_of_a_turn_has_ollamas_name_or_that_of_chat(able: Any, turn: Any) -> None:
    assert chat(able, messages=[USER, {"role": "assistant", "content": "a", **turn}, USER]).status == 200
    assert able.tokenizer.rendered[1]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "assistant", "content": ["a", {"type": "tool_use", "id": "1", "name": "f"}]},
         {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "ok"}]}],
        [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1", "name": "f", "arguments": {}}]},
         {"role": "tool", "tool_call_id": "1", "content": "ok"}],
        [{"role": "assistant", "content": "a", "tool_calls": [{"name": "g"}, {"function": {"name": "f"}}]},
         {"role": "tool", "tool_name": "f", "content": "ok"}],
    ],
)  # fmt: skip
def test_turns_in_the_forms_of_other_apis(able: Any, turns: Any) -> None:
    """They were a 400, though the same server takes them elsewhere."""
    assert chat(able, messages=[USER, *turns]).status == 200
    call, result = able.tokenizer.rendered[1:]
    assert (call["content"], result["content"]) == ("a", "ok")
    assert result["tool_call_id"] == call["tool_calls"][-1]["id"]
    assert call["tool_calls"][-1]["function"] == {"name": "f", "arguments": {}}
