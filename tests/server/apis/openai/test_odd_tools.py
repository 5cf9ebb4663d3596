"""Tools as strangers declare them: other APIs' forms, tools that nobody here hosts, names of any signs."""

import json
from typing import Any

import pytest

from tests.chat_templates_for_tests import QWEN3
from weft.server.formats.harmony import HARMONY
from weft.server.formats.parser import Kind, Tool

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FORMS: list[dict[str, Any]] = [
    FUNCTION,
    {"function": FUNCTION["function"]},
    {"type": "function", "name": "f", "parameters": SCHEMA},
    {"name": "f", "description": "It is.", "input_schema": SCHEMA},
    {"type": "custom", "name": "f", "input_schema": SCHEMA},
]
HOSTED = [
    ({"type": "web_search"}, "web_search"),
    ({"google_search": {}}, "google_search"),
    ({"type": "code_execution_20250522", "name": "code"}, "code_execution_20250522"),
    ({"type": "mcp", "server_label": "x", "server_url": "http://x"}, "mcp"),
]


@pytest.fixture
def site(make_site: Any) -> Any:
    site = make_site()
    site.tokenizer.template = QWEN3
    site.rebuild()
    return site


def call(site: Any, path: str, tools: list[Any], **fields: Any) -> Any:
    user = [{"role": "user", "content": "Hi"}]
    body: dict[str, Any] = {"input": "Hi", "store": False} if path == "/v1/responses" else {"messages": user}
    more = {"max_tokens": 99} if path == "/v1/messages" else {"stream": False}
    return site.call("POST", path, json={**body, **more, "tools": tools, **fields})


PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tool", FORMS)
def test_every_api_takes_functions_in_every_form(site: Any, path: str, tool: Any) -> None:
    site.engine.answers = ['<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>']
    reply = call(site, path, [tool])
    assert (reply.status, reply.headers.get("x-ignored-params")) == (200, None), reply.text
    (shown,) = site.tokenizer.variables["tools"]
    assert (shown["function"]["name"], shown["function"]["parameters"]) == ("f", SCHEMA)
    assert '"f"' in reply.text and '\\"enum\\": [\\"x\\"]' in site.engine.asked[-1].guidance.grammar


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/v1/responses"])
@pytest.mark.parametrize(("tool", "kind"), HOSTED)
def test_what_nobody_here_hosts_is_left_out_and_named(site: Any, path: str, tool: Any, kind: str) -> None:
    reply = call(site, path, [tool, FUNCTION])
    assert (reply.status, reply.headers["x-ignored-params"]) == (200, f"tools[0].type={kind}"), reply.text
    assert [each["function"]["name"] for each in site.tokenizer.variables["tools"]] == ["f"]
    reply = call(site, path, [tool])
    assert (reply.status, reply.headers["x-ignored-params"]) == (200, f"tools[0].type={kind}"), reply.text
    assert "tools" not in site.tokenizer.variables


def test_strict_parameters_refuse_what_would_be_left_out(make_site: Any) -> None:
    site = make_site(strict_params=True)
    site.tokenizer.template = QWEN3
    site.rebuild()
    reply = site.chat(tools=[FUNCTION, {"type": "web_search"}])
    assert (reply.status, reply.error["param"]) == (400, "tools[1].type")


def test_a_required_call_needs_a_tool_that_is_hosted(site: Any) -> None:
    reply = site.chat(tools=[{"type": "web_search"}], tool_choice="required")
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    assert "tools[0].type=web_search" in reply.error["message"]


@pytest.mark.parametrize("parameters", [None, "", [], {}])
def test_no_schema_takes_no_arguments(site: Any, parameters: Any) -> None:
    inner = {"name": "f", "parameters": parameters}
    for tool in ({"type": "function", "function": inner}, {"type": "function", **inner}):
        for path in PATHS:
            assert call(site, path, [tool]).status == 200
            (grammar,) = json.loads(site.engine.asked[-1].guidance.grammar)["grammars"]
            assert 'arguments_0: "{}"' in grammar["lark_grammar"]
    assert site.chat(functions=[inner]).status == 200


NAMES = ["fs/read", "a:b", "get weather", "a.b-c", "météo", "天气", "a@b#c$", "x'y", "a,b=c", "1tool", "a(b)[0]{c}"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_comes_back_as_it_was_sent(site: Any, name: str) -> None:
    site.engine.answers = [f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>']
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    message = site.chat(tools=[tool]).json["choices"][0]["message"]
    assert [each["function"]["name"] for each in message["tool_calls"]] == [name]
    grammar = json.loads(site.engine.asked[-1].guidance.grammar)["grammars"][0]["lark_grammar"]
    assert json.dumps(name)[1:-1] in grammar.replace("\\\\", "\\")
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
    messages = [{"role": "user", "content": "Hi"}, message, result]
    reply = site.chat(messages=messages, tools=[tool], tool_choice={"type": "function", "function": {"name": name}})
    assert reply.status == 200, reply.text
    assert call(site, "/v1/messages", [tool]).json["content"][0]["name"] == name
    assert call(site, "/v1/responses", [tool]).json["output"][0]["name"] == name


@pytest.mark.parametrize("name", ["", " f", 'a"b', "a\\b", "a<b>", "a\nb", "n" * 257])
def test_a_name_that_no_format_can_hold_is_refused(site: Any, name: str) -> None:
    reply = site.chat(tools=[{"type": "function", "function": {"name": name}}])
    assert (reply.status, reply.error["param"]) == (400, "tools[0].function.name")


def test_harmony_reads_names_with_spaces() -> None:
    tools = [Tool(name, {}) for name in ("get", "get weather", "get weather now")]
    for tool in tools:
        for head in (
            f"<|channel|>commentary to=functions.{tool.name}",
            f" to=functions.{tool.name}<|channel|>commentary",
        ):
            parser = HARMONY.parser(tools)
            pieces = parser.feed(f'{head} <|constrain|>json<|message|>{{"a": 1}}<|call|>') + parser.finish()
            assert [piece.text for piece in pieces if piece.kind is Kind.CALL] == [tool.name]
