"""Tools of a body -> what may be called, and every way to get that wrong."""

from typing import Any

import pytest

from weft.server.errors import InvalidRequestError, JsonSchemaError, UnsupportedValueError
from weft.server.task.bodies import ChatCompletionBody
from weft.server.task.tool_use import ToolUse, tool_use

WEATHER = {"name": "weather", "description": "Tells.", "parameters": {"type": "object", "properties": {"city": {}}}}
TIME = {"name": "time"}


def tools(*functions: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function} for function in functions]


def read(**fields: Any) -> ToolUse | None:
    return read_both(**fields)[0]


def read_both(strict: bool = False, **fields: Any) -> tuple[ToolUse | None, list[str]]:
    return tool_use(ChatCompletionBody.model_validate({"messages": [], **fields}), strict=strict)


def names(use: ToolUse | None) -> list[str]:
    assert use is not None
    return [tool.name for tool in use.tools]


def test_without_tools_there_is_nothing_to_call() -> None:
    assert read() is None
    assert read(tool_choice="auto") is None
    assert read(tools=tools(WEATHER), tool_choice="none") is None


def test_every_tool_may_be_called_as_often_as_the_model_likes() -> None:
    use = read(tools=tools(WEATHER, TIME))
    assert use is not None
    assert names(use) == ["weather", "time"]
    assert use.shown == tools(WEATHER, TIME)
    assert use.tools[0].parameters == WEATHER["parameters"]
    assert use.tools[1].parameters == {"type": "object", "properties": {}}
    assert (use.is_required, use.allows_many, use.is_legacy) == (False, True, False)


@pytest.mark.parametrize(
    ("fields", "callable_names", "is_required", "allows_many"),
    [
        ({"tool_choice": "required"}, ["weather", "time"], True, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "time"], True, False),
        ({"tool_choice": {"type": "function", "function": {"name": "time"}}}, ["time"], True, False),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": tools({"name": "weather"})},
                }
            },
            ["weather"],
            False,
            True,
        ),
    ],
)
def test_choices(fields: dict[str, Any], callable_names: list[str], is_required: bool, allows_many: bool) -> None:
    use = read(tools=tools(WEATHER, TIME), **fields)
    assert use is not None
    assert names(use) == callable_names
    assert len(use.shown) == 2  # the prompt stays the same, whichever may be called
    assert (use.is_required, use.allows_many) == (is_required, allows_many)


def test_the_old_names_mean_the_same() -> None:
    use = read(functions=[WEATHER, TIME], function_call={"name": "weather"})
    assert use is not None
    assert names(use) == ["weather"]
    assert (use.is_required, use.allows_many, use.is_legacy) == (True, False, True)
    assert read(functions=[WEATHER], function_call="none") is None


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    custom = {"name": "sql", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}}
    use = read(tools=[{"type": "custom", "custom": custom}, *tools(TIME)])
    assert use is not None
    assert use.custom_names == {"sql"}
    assert use.tools[0].parameters["properties"] == {"input": {"type": "string", "pattern": "^(?:a+)$"}}


@pytest.mark.parametrize("fields", [{"tools": []}, {"functions": []}, {"tools": [], "tool_choice": "auto"}])
def test_a_list_without_tools_is_no_tools(fields: dict[str, Any]) -> None:
    assert read(**fields) is None


@pytest.mark.parametrize("strict", [None, False, True])
def test_only_a_strict_function_is_taken_literally(strict: bool | None) -> None:
    use = read(tools=tools({**TIME, "strict": strict}))
    assert use is not None
    assert use.tools[0].is_strict is (strict is True)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": tools(TIME) * 1025}, "tools", "at most 1024 tools, got 1025"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": tools(TIME, TIME)}, "tools[1]", "'time' a second time"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", "is required"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"function_call": {"name": "f"}}, "function_call", "needs functions"),
        ({"functions": [TIME], "tools": tools(TIME)}, "functions", "only one"),
        ({"functions": [], "function_call": {"name": "f"}}, "function_call", "needs functions"),
        ({"functions": [TIME], "function_call": {"name": "f"}}, "function_call.name", "one of ['time'], got 'f'"),
        (
            {"tools": tools(TIME), "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
            "must be one of ['time'], got 'f'",
        ),
        ({"tools": tools(TIME), "tool_choice": {"type": "function"}}, "tool_choice.function", "is required"),
        (
            {"tools": tools(TIME), "tool_choice": {"type": "custom", "custom": {"name": "time"}}},
            "tool_choice.custom.name",
            "must be one of [], got 'time'",
        ),
        (
            {"tools": tools(TIME), "tool_choice": {"type": "allowed_tools"}},
            "tool_choice.allowed_tools.tools",
            "at least one tool",
        ),
        (
            {
                "tools": tools(TIME),
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": tools({"name": "time"}, {"name": "f"})},
                },
            },
            "tool_choice.allowed_tools.tools[1].function.name",
            "got 'f'",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        read(**fields)
    assert raised.value.param == param
    assert said in raised.value.message


def lark(definition: str) -> dict[str, Any]:
    format = {"type": "grammar", "grammar": {"syntax": "lark", "definition": definition}}
    return {"type": "custom", "custom": {"name": "sql", "description": "Asks.", "format": format}}


def test_a_regular_grammar_becomes_a_pattern_inside_json() -> None:
    use = read(tools=[lark('start: "a" b+\nb: /[xy]/ "\\n"')])
    assert use is not None
    assert use.tools[0].parameters["properties"]["input"]["pattern"] == r"^(?:(?:(?:a)(?:(?:(?:[xy])(?:\n)))+))$"
    said = 'Asks.\nThe input follows this Lark grammar:\nstart: "a" b+\nb: /[xy]/ "\\n"'
    assert use.shown[0]["function"]["description"] == said


def regex(definition: str, syntax: str = "regex") -> dict[str, Any]:
    format = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "sql", "description": "Asks.", "format": format}}


@pytest.mark.parametrize(
    "tool",
    [
        lark('start: "(" start? ")"'),
        lark("start: missing"),
        lark("no grammar"),
        regex("(?=a)b"),
        regex("("),
        regex(r"(a)\1"),
        regex("root ::= [a-z]+", "gbnf"),
    ],
)
def test_an_input_that_cannot_be_followed_is_free_text(tool: Any) -> None:
    use, left_out = read_both(tools=[*tools(TIME), tool])
    assert use is not None
    assert left_out == ["tools[1].custom.format.grammar.definition"]
    assert use.tools[1].parameters["properties"] == {"input": {"type": "string"}}
    definition = tool["custom"]["format"]["grammar"]["definition"]
    assert use.shown[1]["function"]["description"].startswith("Asks.\nThe input follows this ")
    assert use.shown[1]["function"]["description"].endswith(definition)
    with pytest.raises(UnsupportedValueError) as raised:
        read_both(tools=[*tools(TIME), tool], strict=True)
    assert raised.value.param == "tools[1].custom.format.grammar.definition"


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"type": "array"}, "parameters.type must allow an object (tool 'bad')"),
        ({"properties": ["a"]}, 'properties cannot be ["a"]'),
        ({"properties": {"a": {"type": 5}}}, "type cannot be 5"),
    ],
)
def test_a_schema_that_is_none_is_said_of_its_tool_if_it_is_strict(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(JsonSchemaError) as raised:
        read(tools=tools(TIME, {"name": "bad", "parameters": parameters, "strict": True}))
    assert raised.value.param == "tools[1].function.parameters"
    assert said in raised.value.message
    use = read(tools=tools(TIME, {"name": "bad", "parameters": parameters}))
    assert use is not None
    shown = {**parameters, "properties": {}} if parameters.get("properties") == ["a"] else parameters
    assert use.shown[1]["function"]["parameters"] == shown  # the model reads it as it was declared
    assert use.lost[0].startswith("tools[1].function.parameters.")


@pytest.mark.parametrize(
    ("odd", "shown"),
    [
        ({"required": True}, {"required": []}),
        ({"required": 5}, {"required": []}),
        ({"required": "a"}, {"required": ["a"]}),
        ({"properties": ["a"]}, {"properties": {}}),
        ({"properties": "none"}, {"properties": {}}),
        ({"properties": [{"name": "a"}], "required": {"a": 1}}, {"properties": {}, "required": []}),
    ],
)
def test_templates_are_shown_lists_and_objects_where_they_go_through_them(odd: Any, shown: Any) -> None:
    """One such tool failed the request, for templates do not ask what `required` and `properties` are."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    use = read(tools=tools(TIME, {"name": "odd", "parameters": {**schema, **odd}}))
    assert use is not None and use.shown[1]["function"]["parameters"] == {**schema, **shown}


def test_a_long_name_and_many_tools_are_taken() -> None:
    many = [{"name": f"mcp__a-server.of-somebody__{'x' * 200}_{i}"} for i in range(1024)]
    use = read(tools=tools(*many))
    assert use is not None
    assert names(use) == [each["name"] for each in many]
    with pytest.raises(InvalidRequestError, match="at most 1024 tools, got 1025"):
        read(tools=tools(*many, {"name": "more"}))
    with pytest.raises(ValueError, match="name"):
        read(tools=tools({"name": "x" * 257}))


def test_only_what_may_be_called_is_reported() -> None:
    bad = {
        "name": "bad",
        "parameters": {"type": "object", "properties": {"x": {"not": {}}, "y": {"not": {"const": 1}}}},
    }
    named = {"type": "function", "function": {"name": "time"}}
    for choice, lost in (("auto", ["tools[1].function.parameters.properties.y.not"]), (named, [])):
        use = read(tools=tools(TIME, bad), tool_choice=choice)
        assert use is not None
        assert use.lost == lost
