"""Tools of POST /v1/responses as agents declare them: namespaces, and tools that only another server hosts."""

import logging
from typing import Any

import pytest

from tests.chat_templates_for_tests import QWEN3
from weft.server.apis.responses.mcp_tools import NO_HOSTED
from weft.server.apis.responses.schema import ResponseBody
from weft.server.apis.responses.tools import read_tools
from weft.server.errors import InvalidRequestError, UnsupportedValueError
from weft.server.task import validation
from weft.server.task.tool_use import QualifiedName


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, **more}


def read(*tools: dict[str, Any], strict: bool = False, **fields: Any) -> Any:
    return read_tools(ResponseBody.model_validate({"tools": list(tools), **fields}), NO_HOSTED, strict=strict)


FILES = {
    "type": "namespace",
    "name": "mcp__files__",
    "description": "Tools for files.",
    "tools": [function("read", description="Reads."), {"type": "custom", "name": "_write"}, {"type": "web_search"}],
}
FOREIGN = [
    {"type": "web_search", "external_web_access": False, "filters": {"allowed_domains": []}},
    {"type": "local_shell"},
    {"type": "image_generation", "output_format": "png", "name": 3},
    {"type": "tool_search", "execution": "client", "description": ["x"], "parameters": "y"},
    {"type": "code_interpreter", "container": {"type": "auto"}, "strict": "no"},
    {"type": "of tomorrow"},
]


@pytest.mark.parametrize("tool", FOREIGN)
def test_a_tool_that_nobody_hosts_is_left_out_and_named(tool: dict[str, Any]) -> None:
    use, left_out = read(function("f"), tool)
    assert [each.name for each in use.tools] == ["f"]
    assert left_out == [f"tools[1].type={tool['type']}"]
    assert read(tool) == (None, [f"tools[0].type={tool['type']}"])
    with pytest.raises(UnsupportedValueError, match=r"tools\[1\].type") as found:
        read(function("f"), tool, strict=True)
    assert found.value.param == "tools[1].type"


def test_functions_of_a_namespace_have_qualified_names() -> None:
    use, left_out = read(function("read"), FILES)
    assert [each.name for each in use.tools] == ["read", "mcp__files__read", "mcp__files__write"]
    assert use.custom_names == {"mcp__files__write"}
    assert use.qualified == {
        "mcp__files__read": QualifiedName("mcp__files__", "read"),
        "mcp__files__write": QualifiedName("mcp__files__", "_write"),
    }
    described = [each["function"].get("description") for each in use.shown]
    assert described == [None, "Tools for files.\nReads.", None]
    assert left_out == ["tools[1].tools[2].type=web_search"]


def test_a_qualified_name_may_be_longer_than_a_name_on_the_wire() -> None:
    use, _ = read({"type": "namespace", "name": "n" * 64, "tools": [function("f" * 64)]})
    assert [each.name for each in use.tools] == ["n" * 64 + "__" + "f" * 64]


def test_a_grammar_that_cannot_be_followed_is_shown_to_the_model_all_the_same() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'}
    tool = {"type": "custom", "name": "lisp", "format": grammar}
    use, left_out = read(tool)
    assert left_out == ["tools[0].format.definition"]
    assert use.tools[0].parameters["properties"] == {"input": {"type": "string"}}
    assert use.shown[0]["function"]["description"].endswith(grammar["definition"])
    with pytest.raises(UnsupportedValueError) as found:
        read(tool, strict=True)
    assert found.value.param == "tools[0].format.definition"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([{"type": "namespace", "name": "n", "tools": [function("f"), function("_f")]}], "tools[0]"),
        ([function("n__f"), {"type": "namespace", "name": "n", "tools": [function("f")]}], "tools[1]"),
        ([function("f", tools=[])], "tools[0].tools"),
        ([function("f", server_url="http://x")], "tools[0].server_url"),
    ],
)
def test_a_wrong_declaration_is_named(tools: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequestError) as found:
        read(*tools)
    assert found.value.param == param


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "namespace": "mcp__files__", "name": "read"}, {"mcp__files__read"}),
        ({"type": "function", "name": "mcp__files__read"}, {"mcp__files__read"}),
        ({"type": "function", "name": "read"}, {"read"}),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "web_search"}, {"type": "function", "name": "read"}],
            },
            {"read"},
        ),
        ("required", {"read", "mcp__files__read", "mcp__files__write"}),
    ],
)
def test_a_choice_finds_tools_of_namespaces(choice: Any, names: set[str]) -> None:
    use, _ = read(function("read"), FILES, {"type": "web_search"}, tool_choice=choice)
    assert {each.name for each in use.tools} == names


def test_a_required_call_of_no_tool_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"tools\[0\].type=web_search"):
        read({"type": "web_search"}, tool_choice="required")


CALL = '<tool_call>\n{"name": "mcp__files__read", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_comes_back_under_both_of_its_names(site: Any, stream: bool) -> None:
    site.tokenizer.template = QWEN3
    site.rebuild()
    site.engine.answers = [CALL]
    body = {"input": "Hi", "store": False, "stream": stream, "tools": [FILES, {"type": "web_search"}]}
    reply = site.call("POST", "/v1/responses", json=body)
    assert reply.status == 200
    names = reply.headers["x-ignored-params"].split(",")
    assert {"tools[0].tools[2].type=web_search", "tools[1].type=web_search"} <= set(names)
    assert '"name":"read","arguments":"{}","status":"completed","namespace":"mcp__files__"' in reply.text
    assert "mcp__files__read" not in reply.text.split("response.output_item.done")[-1]

    call = {"type": "function_call", "call_id": "c", "namespace": "mcp__files__", "name": "read", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "text"}
    again = {**body, "stream": False, "input": [{"role": "user", "content": "Hi"}, call, output]}
    assert site.call("POST", "/v1/responses", json=again).status == 200
    (turn,) = (each for each in site.tokenizer.rendered if each["role"] == "assistant")
    assert turn["tool_calls"][0]["function"]["name"] == "mcp__files__read"


def test_what_is_left_out_is_said_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    validation._noted.clear()
    with caplog.at_level(logging.INFO):
        for i in range(3):
            validation.note_left_out([f"tools[{i}].type=web_search", "tools[9].type=\n\x1b[0m"])
    assert sorted(record.getMessage() for record in caplog.records) == [
        r"Left out of a prompt: tools[].type=\n\x1b[0m",
        "Left out of a prompt: tools[].type=web_search",
    ]
