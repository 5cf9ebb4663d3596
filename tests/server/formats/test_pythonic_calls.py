import json

import pytest

from tests.server.formats.text_calls_for_tests import TOOLS, Said, parse
from weft.server.formats.parser import Kind, Tool
from weft.server.formats.pythonic_calls import PYTHONIC

PYTHONIC_TEMPLATE = r"""
{{- "To call functions, please respond with a python list of the calls. " }}
{{- 'Respond in the format [func_name1(params_name1=params_value1, params_name2=params_value2...), ' }}
{{- 'func_name2(params)] Do not use variables.' }}
"""
LLAMA_4_JSON_TEMPLATE = r"""
{{- '<|header_start|>assistant<|header_end|>\n\n' -}}{{- '<|python_start|>' }}
{{- '{"name": "' + tool_call.function.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.function.arguments | tojson }}
"""


def _said(text: str) -> Said:
    said = parse(PYTHONIC.parser((*TOOLS, Tool("f", {"type": "object", "properties": {"a": {}}}))), [text])
    assert parse(PYTHONIC.parser((*TOOLS, Tool("f", {"type": "object", "properties": {"a": {}}}))), text) == said
    return said


def test_templates_tell_the_format() -> None:
    assert PYTHONIC.is_used_by(PYTHONIC_TEMPLATE)
    assert not PYTHONIC.is_used_by(LLAMA_4_JSON_TEMPLATE)


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("''", ""),
        ('"it\'s"', "it's"),
        (r"'it\'s \"so\"'", 'it\'s "so"'),
        (r"'\n\t\\\x41\u00e9\U0001F600\0'", "\n\t\\Aé😀\0"),
        (r"'\ud83d\ude00'", "😀"),
        (r"'\q\x4\u12'", "\\q\\x4\\u12"),
        (r"'a\/b'", "a/b"),
        ("'''it's \"so\"\n'''", 'it\'s "so"\n'),
        ("-5", -5),
        ("0x10", 16),
        ("1e3", 1000.0),
        ("True", True),
        ("false", False),
        ("None", None),
        ("[]", []),
        ("[ 1 , 'x' , [None] , ]", [1, "x", [None]]),
        ("{}", {}),
        ("{'a': {'b': [1, {}]}, 'c': '}'}", {"a": {"b": [1, {}]}, "c": "}"}),
        ("{1: 2, None: 3}", {"1": 2, "null": 3}),
    ],
)
def test_literals_become_json(literal: str, value: object) -> None:
    (call, arguments) = _said(f"[f(a={literal})]")
    assert call == (Kind.CALL, "f")
    assert json.loads(arguments[1]) == {"a": value}


@pytest.mark.parametrize(
    "text",
    [
        "[1](x)",
        "[f](x)",
        "[f(x)]",
        "[f(",
        "f(a=1)",
        "[nope(a=1)]",
        "<|python_start|>print(1)<|python_end|>",
        "<|python_start|>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert _said(text) == [(Kind.CONTENT, text)]


@pytest.mark.parametrize(
    ("text", "told", "rest"),
    [
        ("[f(a=foo)]", '{"a": ', "foo)]"),
        ("[f(a=[1 2])]", '{"a": [1', "2])]"),
        ("[f(a={[1]: 2})]", '{"a": {', "1]: 2})]"),
        ("[f(a=1; b=2)]", '{"a": 1', "; b=2)]"),
        ("[f(a='x", '{"a": "x', ""),
        ("[f(a=[1, ", '{"a": [1', ""),
        ("[f(a=1", '{"a": 1', ""),
    ],
)
def test_a_call_that_goes_on_as_none_can_is_not_closed(text: str, told: str, rest: str) -> None:
    expected = [(Kind.CALL, "f"), (Kind.ARGUMENTS, told), (Kind.CONTENT, rest)]
    assert _said(text) == expected[: 3 if rest else 2]


def test_calls_may_stand_on_lines_of_their_own() -> None:
    text = "Sure: [f(\n    a = 1,\n),\n ping( )\n]<|python_end|>\n"
    assert _said(text) == [
        (Kind.CONTENT, "Sure:"),
        (Kind.CALL, "f"),
        (Kind.ARGUMENTS, '{"a": 1}'),
        (Kind.CALL, "ping"),
        (Kind.ARGUMENTS, "{}"),
    ]


def test_a_second_call_of_no_tool_is_content() -> None:
    assert _said("[ping(), nope()]") == [(Kind.CALL, "ping"), (Kind.ARGUMENTS, "{}"), (Kind.CONTENT, "nope()]")]
