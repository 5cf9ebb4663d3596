# ruff: noqa: RUF001 (the bars of Step)
import json

import pytest
from llguidance import LLMatcher

from tests.server.formats.text_calls_for_tests import TOOLS, Said, parse, tokenizer
from weft.server.formats.parser import AnswerRules, Kind, Tool
from weft.server.formats.xml_calls import XmlFormat
from weft.server.formats.xml_families import ALL, GLM, MINIMAX_M2, QWEN3_CODER, SEED, STEP3

QWEN3_CODER_TEMPLATE = r"""
{{- 'If you choose to call a function ONLY reply in the following format with NO suffix:\n\n<tool_call>\n' }}
{{- '<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>' }}
{%- for tool_call in message.tool_calls %}
    {{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}
    {%- for args_name, args_value in tool_call.arguments|items %}
        {{- '<parameter=' + args_name + '>\n' }}
"""
GLM_TEMPLATE = r"""
For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>
{{ '\n<tool_call>' + tc.name }}
{% for k, v in tc.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
"""
HERMES_TEMPLATE = r"""
{{- "For each function call, return a json object with function name and arguments within <tool_call></tool_call>" }}
{{- " XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}
"""
SEED_TEMPLATE = (
    "<seed:tool_call>\n<function=example>\n<parameter=p>\nvalue\n</parameter>\n</function>\n</seed:tool_call>"
)
MINIMAX_TEMPLATE = r"""
{%- set toolcall_begin_token = '<minimax:tool_call>' -%}
{{- '\n' ~ toolcall_begin_token }}
<invoke name="tool-name-1">
<parameter name="param-key-1">param-value-1</parameter>
</invoke>
"""
STEP_TEMPLATE = """
{{- '<｜tool_calls_begin｜>' }}
{{- '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="' + call.name + '">' }}
"""

UNTYPED = (Tool("f", {"type": "object", "properties": {"a": {}, "b": {"type": ["null", "string"]}}}),)


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (QWEN3_CODER_TEMPLATE, QWEN3_CODER),
        (GLM_TEMPLATE, GLM),
        (HERMES_TEMPLATE, None),
        (SEED_TEMPLATE, SEED),
        (MINIMAX_TEMPLATE, MINIMAX_M2),
        (STEP_TEMPLATE, STEP3),
    ],
)
def test_templates_tell_the_format(template: str, format: XmlFormat | None) -> None:
    assert [known for known in ALL if known.is_used_by(template)] == ([format] if format else [])


def _both_ways(format: XmlFormat, tools: tuple[Tool, ...], text: str) -> Said:
    said = parse(format.parser(tools), [text])
    assert parse(format.parser(tools), text) == said
    return said


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", '""'),
        ("\n", '""'),
        ("\nx", '"x"'),
        ("x\n", '"x"'),
        ("\n\nx\n\n", '"\\nx\\n"'),
        ("x", '"x"'),
        ("</parameter", '"</parameter"'),
    ],
)
def test_one_line_break_at_either_end_of_a_qwen_value_is_of_the_format(value: str, expected: str) -> None:
    text = f"<tool_call>\n<function=get>\n<parameter=key>{value}</parameter>\n</function>\n</tool_call>"
    assert _both_ways(QWEN3_CODER, TOOLS, text) == [(Kind.CALL, "get"), (Kind.ARGUMENTS, f'{{"key": {expected}}}')]


def test_qwen_calls_are_read_without_their_outer_tag_and_without_line_breaks() -> None:
    text = "So: <function=get><parameter=key>a</parameter></function> <function=ping>\n</tool_call>\nbye"
    assert _both_ways(QWEN3_CODER, TOOLS, text) == [
        (Kind.CONTENT, "So:"),
        (Kind.CALL, "get"),
        (Kind.ARGUMENTS, '{"key": "a"}'),
        (Kind.CALL, "ping"),
        (Kind.ARGUMENTS, "{}"),
        (Kind.CONTENT, "bye"),
    ]


def test_without_a_type_json_is_json_and_all_else_is_text() -> None:
    for value, expected in [("5", "5"), ("[1,2]", "[1, 2]"), ("five", '"five"'), ('"5"', '"5"')]:
        arguments = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key in ("a", "new"))
        text = f"<tool_call>f{arguments}</tool_call>"
        expected_text = f'{{"a": {expected}, "new": {expected}}}'
        assert _both_ways(GLM, UNTYPED, text) == [(Kind.CALL, "f"), (Kind.ARGUMENTS, expected_text)]


@pytest.mark.parametrize(
    "text",
    [
        "1 <tool_call> 2",
        "<tool_call>\n<tool_call>\n",
        "<tool_call>\n<function=get> oh\n",
        "<tool_call>\n<function=get_al>\n</function>",
        "<function=",
        " \n",
        "<tool_call>\n<function=get>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert _both_ways(QWEN3_CODER, TOOLS, text) == [(Kind.CONTENT, text)]


def test_a_marker_in_what_is_no_call_may_open_one() -> None:
    text = "<tool_call> <tool_call>get <tool_call>ping</tool_call>"
    assert _both_ways(GLM, TOOLS, text) == [
        (Kind.CONTENT, "<tool_call> <tool_call>get"),
        (Kind.CALL, "ping"),
        (Kind.ARGUMENTS, "{}"),
    ]


def test_a_call_that_goes_on_as_none_can_is_not_closed() -> None:
    text = "<tool_call>get<arg_key>key</arg_key><arg_value>a</arg_value> oh no</tool_call>"
    assert _both_ways(GLM, TOOLS, text) == [
        (Kind.CALL, "get"),
        (Kind.ARGUMENTS, '{"key": "a"'),
        (Kind.CONTENT, "oh no</tool_call>"),
    ]


def test_region_follows_the_text() -> None:
    parser = GLM.parser(TOOLS)
    regions = []
    for text in (
        "Well ",
        "<tool_call>",
        "get<arg_key>",
        "key</arg_key><arg_value>x",
        "</arg_value></tool_call>",
        " so",
    ):
        parser.feed(text)
        regions.append(parser.region)
    assert regions == [Kind.CONTENT, *[Kind.CALL] * 3, Kind.CONTENT, Kind.CONTENT]


BOUND = (
    Tool(
        "f",
        {
            "type": "object",
            "properties": {
                "a": {"type": "string", "pattern": "^[a-c]{3}$"},
                "b": {"type": "string", "minLength": 2, "maxLength": 3},
                "c": {"type": "string", "pattern": "x/", "maxLength": 4},
            },
        },
    ),
)


@pytest.mark.parametrize("vocabulary", ["demo", "special"])
@pytest.mark.parametrize("format", [QWEN3_CODER, GLM], ids=["qwen3_coder", "glm"])
@pytest.mark.parametrize(
    ("key", "value", "is_good"),
    [
        ("a", "abc", True),
        ("a", "abcd", False),
        ("a", "ab", False),
        ("b", "ö\nx", True),
        ("b", "x", False),
        ("b", "xxxx", False),
        ("c", "ax/b", True),
        ("c", "ab", False),
        ("c", "aax/b", False),
    ],
)
def test_strings_keep_to_their_schema(format: XmlFormat, vocabulary: str, key: str, value: str, is_good: bool) -> None:
    if format is GLM:
        text = f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    else:
        text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    backend, llguidance_vocabulary = tokenizer(vocabulary)

    def mark(marker: str) -> str:
        token_id = backend.token_to_id(marker)
        return json.dumps(marker) if token_id is None else f"<[{token_id}]>"

    grammar = f"start: answer\n{format.grammar(AnswerRules(BOUND, mark, is_required=True))}"
    matcher = LLMatcher(llguidance_vocabulary, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = backend.encode(text, add_special_tokens=False).ids
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == is_good
