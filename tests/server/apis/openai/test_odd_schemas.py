"""Schemas of strangers through HTTP, beside an engine that compiles the grammars: what stays enforced, what is said."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.chat_templates_for_tests import QWEN3
from weft.engine.guidance.meeting import check_meeting
from weft.engine.wire.messages import FinishReason, RejectReason
from weft.server.errors import rejection

TEXT = {"type": "string"}
KEPT = {"type": "string", "enum": ["kept 1", "kept 2"]}
NOTHING: dict[str, Any] = {"allOf": [{"type": "integer"}, {"type": "null"}]}
"""No value is left, which only the compiler finds out."""


@pytest.fixture
def site(make_site: Any) -> Any:
    site = make_site()
    site.tokenizer.template = QWEN3
    site.rebuild()
    site.num_compiled = 0
    generate = site.engine.generate

    async def compile_first(request: Any) -> Any:
        site.num_compiled += 1
        try:
            for grammar in json.loads(request.guidance.grammar)["grammars"]:
                check_meeting(grammar)
            fault = LLMatcher.validate_grammar(request.guidance.grammar)
        except ValueError as error:
            fault = str(error)
        if fault:
            raise rejection(RejectReason.GRAMMAR, f"the grammar cannot be used: {fault}")
        return await generate(request)

    site.engine.generate = compile_first
    return site


def function(name: str, strict: bool | None = None, **members: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": members, "required": list(members)}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def grammar_of(site: Any) -> str:
    text: str = site.engine.asked[-1].guidance.grammar
    return text.replace("\\", "")


@pytest.mark.parametrize("api", ["chat", "messages", "responses", "format"])
def test_what_only_the_compiler_refuses_is_freed_alone(site: Any, api: str) -> None:
    tools = [function("good", a=KEPT), function("bad", b=KEPT, c=NOTHING, d={"type": "integer", "maximum": 77})]
    schemas = [tool["function"]["parameters"] for tool in tools]
    user = [{"role": "user", "content": "Hi"}]
    flat = [{"type": "function", "name": f"f{i}", "parameters": schema} for i, schema in enumerate(schemas)]
    theirs = [{"name": f"f{i}", "input_schema": schema} for i, schema in enumerate(schemas)]
    path, body, at = {
        "chat": ("/v1/chat/completions", {"messages": user, "tools": tools}, "tools[1].function.parameters"),
        "messages": ("/v1/messages", {"messages": user, "max_tokens": 9, "tools": theirs}, "tools[1].input_schema"),
        "responses": ("/v1/responses", {"input": "Hi", "store": False, "tools": flat}, "tools[1].parameters"),
        "format": ("/api/chat", {"messages": user, "stream": False, "format": schemas[1]}, "format"),
    }[api]
    for _ in range(2):
        before = site.num_compiled
        reply = site.call("POST", path, json=body)
        assert reply.status == 200, reply.text
        assert reply.headers["x-ignored-params"] == f"{at}.properties.c.allOf"
        assert "kept 2" in grammar_of(site) and '"maximum": 77' in grammar_of(site) and '"c": {}' in grammar_of(site)
    assert site.num_compiled - before == 1  # the second request is as good as any other


LOOKAHEAD = {"type": "string", "pattern": "^(?=a)b"}


@pytest.mark.parametrize("part", [NOTHING, LOOKAHEAD, {"not": TEXT}, {"type": "array", "uniqueItems": True}])
def test_what_is_strict_is_refused_by_tool_and_path(site: Any, part: Any) -> None:
    reply = site.chat(tools=[function("good", True, a=KEPT), function("my_tool", True, b=KEPT, c=part)])
    assert (reply.status, reply.error["param"]) == (400, "tools[1].function.parameters")
    assert "tools[1].function.parameters.properties.c" in reply.error["message"]
    assert "(tool 'my_tool')" in reply.error["message"]
    schema = function("x", b=KEPT, c=part)["function"]["parameters"]
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    for fields, at in (
        ({"response_format": wanted}, "response_format.json_schema.schema"),
        ({"guided_json": schema}, "guided_json"),
        ({"structured_outputs": {"json": schema}}, "structured_outputs.json"),
    ):
        reply = site.chat(**fields)
        assert (reply.status, reply.error["param"]) == (400, at)
        assert f"{at}.properties.c" in reply.error["message"]


ODD = {
    "type": "OBJECT",
    "properties": {
        "a": {"type": "STRING", "minLength": 1.0, "pattern": None},
        "b": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "Integer"}},
        "c": {"type": "integer", "minimum": "0", "maximum": "7", "format": "int32"},
    },
    "required": "c",
}


def test_what_is_strict_may_be_spelled_as_strangers_do(site: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": ODD, "strict": True}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": ODD, "strict": True}}
    for fields in ({"tools": [tool], "tool_choice": "required"}, {"response_format": wanted}, {"guided_json": ODD}):
        reply = site.chat(**fields)
        assert (reply.status, reply.headers.get("x-ignored-params")) == (200, None), reply.text
        for part in ('"minLength": 1,', '"maximum": 7', '"required": ["c"]', '{"type": "integer"}'):
            assert part in grammar_of(site) or part.replace(",", "}") in grammar_of(site)
    assert site.tokenizer.variables.get("tools") is None  # as declared where there are tools
    site.chat(tools=[tool])
    assert site.tokenizer.variables["tools"][0]["function"]["parameters"] == {**ODD, "required": ["c"]}


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ({"type": "int"}, '.properties.a.type cannot be "int"'),
        ({"type": "any"}, '.properties.a.type cannot be "any"'),
        ({"type": ["string", "list"]}, '.properties.a.type cannot be ["string", "list"]'),
        ({"type": "string", "required": True}, ".properties.a.required cannot be true"),
    ],
)
def test_what_is_strict_is_json_schema(site: Any, part: dict[str, Any], fault: str) -> None:
    """Types of other languages, and members that call themselves required; a tool that is not strict may have them."""
    tool = function("f", a=part)
    assert site.chat(tools=[tool]).status == 200
    tool["function"]["strict"] = True
    reply = site.chat(tools=[function("g", a=KEPT), tool])
    assert (reply.status, reply.json["error"]["param"]) == (400, "tools[1].function.parameters")
    assert reply.json["error"]["message"].startswith(f"tools[1].function.parameters{fault}"), reply.text
    assert "(tool f)" in reply.text or "(tool 'f')" in reply.text


LONG = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^([a-z]{1,9}|[0-9]{1,9})+$"}}}
ASKED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": LONG}}},
     "response_format.json_schema.schema", "invalid_json_schema"),
    ("/v1/chat/completions", {"structured_outputs": {"regex": "a++"}}, "structured_outputs.regex", "invalid_grammar"),
    ("/v1/chat/completions", {"guided_grammar": "start: /([a-z]{1,9}-?)+/"}, "guided_grammar", "invalid_grammar"),
    ("/v1/chat/completions", {"tools": [function("f", a=KEPT)], "tool_choice": "required"},
     "tools[0].function.parameters", "invalid_json_schema"),
    ("/v1/chat/completions", {"tools": [function("f", a=KEPT), function("g", a=KEPT)], "tool_choice": "required"},
     "tools", "invalid_json_schema"),
    ("/v1/messages", {"max_tokens": 9, "tools": [{"name": "f", "input_schema": LONG}], "tool_choice": {"type": "any"}},
     "tools[0].input_schema", "invalid_json_schema"),
    ("/v1/responses", {"store": False, "text": {"format": {"type": "json_schema", "name": "n", "schema": LONG}}},
     "text.format.schema", "invalid_json_schema"),
    ("/api/chat", {"format": LONG}, "format", "invalid_json_schema"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "at", "code"), ASKED, ids=[f"{path} {at}" for path, _, at, _ in ASKED])
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_on_the_way_names_its_field(
    site: Any, path: str, body: dict[str, Any], at: str, code: str, stream: bool
) -> None:
    """It fails in the midst of an answer, and nothing told which of the fields was meant."""
    site.engine.finish = FinishReason.DEAD_END
    user = [{"role": "user", "content": "Hi"}]
    asked = {"input": user} if path == "/v1/responses" else {"messages": user}
    reply = site.call("POST", path, json={**asked, "stream": stream, **body})
    assert reply.status == (200 if stream else 400)
    assert f'"{at}: the grammar cannot be followed any further' in reply.text.replace("error: ", "")
    if path == "/v1/chat/completions":
        error = reply.events[-1]["error"] if stream else reply.error
        assert (error["param"], error["code"]) == (at, code)
