"""One declaration of a tool in the forms of all APIs; those of formats are tested where they are used."""

from typing import Any

import pytest

from weft.server.text.declared import tool_form

SCHEMA = {"type": "object", "properties": {"a": {}}}
GRAMMAR = {"syntax": "regex", "definition": "a+"}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
        {"function": {"name": "f", "parameters": SCHEMA}},
        {"type": "Function", "function": {"name": "f", "input_schema": SCHEMA}},
        {"type": "function", "name": "f", "parameters": SCHEMA},
        {"name": "f", "parameters": SCHEMA},
        {"name": "f", "input_schema": SCHEMA},
        {"name": "f", "inputSchema": SCHEMA},
        {"type": "custom", "name": "f", "input_schema": SCHEMA},
        {"type": "function", "name": "f", "parameters": '{"type": "object", "properties": {"a": {}}}'},
        {"type": "function", "name": "f", "parameters": {**SCHEMA, "required": None}},
    ],
)
def test_what_is_a_function_is_taken_as_one(tool: dict[str, Any]) -> None:
    form = tool_form(tool)
    assert form.nested == {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    assert form.flat == {"type": "function", "name": "f", "parameters": SCHEMA}


@pytest.mark.parametrize("none", [None, "", []])
def test_a_schema_that_is_nothing_takes_no_arguments(none: Any) -> None:
    for tool in (
        {"type": "function", "function": {"name": "f", "parameters": none}},
        {"name": "f", "input_schema": none},
    ):
        assert tool_form(tool).nested == {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "custom", "custom": {"name": "c", "format": {"type": "grammar", "grammar": GRAMMAR}}},
        {"type": "custom", "name": "c", "format": {"type": "grammar", **GRAMMAR}},
        {"custom": {"name": "c", "format": {"type": "grammar", **GRAMMAR}}},
    ],
)
def test_a_custom_tool_may_be_flat(tool: dict[str, Any]) -> None:
    nested = {"name": "c", "format": {"type": "grammar", "grammar": GRAMMAR}}
    assert tool_form(tool).nested == {"type": "custom", "custom": nested}
    assert tool_form(tool).flat == {"type": "custom", "name": "c", "format": {"type": "grammar", **GRAMMAR}}


@pytest.mark.parametrize(
    ("tool", "kind"),
    [
        ({"type": "web_search"}, "web_search"),
        ({"type": "web_search_20250305", "name": "web_search"}, "web_search_20250305"),
        ({"google_search": {}}, "google_search"),
        ({"type": "mcp", "server_label": "x"}, "mcp"),
        ({"type": 5}, "5"),
    ],
)
def test_what_another_server_hosts_is_named(tool: dict[str, Any], kind: str) -> None:
    form = tool_form(tool)
    assert (form.kind, form.is_called) == (kind, False)


def test_other_members_stay_where_they_are_reported() -> None:
    form = tool_form({"type": "function", "name": "f", "parameters": SCHEMA, "cache_control": {"type": "ephemeral"}})
    assert form.outer == {"cache_control": {"type": "ephemeral"}}
