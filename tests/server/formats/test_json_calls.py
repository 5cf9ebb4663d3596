# ruff: noqa: RUF001 (the bars of DeepSeek)
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.linear_time import assert_linear
from tests.server.formats.call_formats import TEMPLATES, WAYS, Call
from tests.server.formats.feeding import assert_told, cut_at, feed_all
from weft.server.formats.json_calls import ALL
from weft.server.formats.parser import Kind, OutputParser, Tool

FORMATS = {format.name: format for format in ALL}
NAMES = ("get", "get_weather", "f", "send-mail")
TOOLS = [Tool(name, {"type": "object"}) for name in NAMES]
MARKERS = sorted({marker for format in ALL for marker in format.markers} | {"functools[", "```", "</think>", "; "})

_text = st.text(st.sampled_from('ab{}[]",:\\\n \t;é中😀<|`'), max_size=8) | st.sampled_from(MARKERS)
_value = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-2, 2) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)
_arguments = st.builds(
    lambda value, is_ascii, indent: json.dumps(value, ensure_ascii=is_ascii, indent=indent),
    st.dictionaries(_text, _value, max_size=3),
    st.booleans(),
    st.sampled_from([None, 1]),
)
_calls = st.lists(st.tuples(st.sampled_from(NAMES), _arguments), min_size=1, max_size=3)
_content = st.text(st.sampled_from("ab .,:é中\n <[|`f"), max_size=12)

EXAMPLES: list[list[Call]] = [
    [("get", "{}")],
    [("get_weather", '{"city": "Graz", "days": [1, {"a": "}"}]}'), ("f", '{"q": "say \\"hi\\"\\n{[\\\\"}')],
    [("f", '{"é": "中😀", "m": "</tool_call>[TOOL_CALLS] ]}<|/tool_call|>"}'), ("get", "{}"), ("f", "{}")],
]


def told(calls: list[Call]) -> list[tuple[str, str]]:
    return [piece for name, arguments in calls for piece in (("CALL", name), ("ARGUMENTS", arguments))]


def parser(way: str) -> OutputParser:
    return FORMATS[WAYS[way].format].parser(TOOLS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("calls", EXAMPLES)
def test_calls_are_told_however_the_text_is_cut(way: str, calls: list[Call]) -> None:
    text = WAYS[way].write(calls)
    assert_told(lambda: parser(way), f"\n {text}\n" if calls is EXAMPLES[0] else text, told(calls))


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way].takes_content])
def test_content_around_calls(way: str) -> None:
    text = f" Let me\n see.\n\n{WAYS[way].write(EXAMPLES[1])}\n\nDone. "
    expected = [("CONTENT", " Let me\n see."), *told(EXAMPLES[1]), ("CONTENT", "Done. ")]
    assert_told(lambda: parser(way), text, expected)


@settings(max_examples=8, deadline=None)
@given(st.data(), _calls, _content, st.lists(st.integers(0, 2000), max_size=12))
@pytest.mark.parametrize("way", WAYS)
def test_random_calls_and_cuts(way: str, data: st.DataObject, calls: list[Call], content: str, cuts: list[int]) -> None:
    if not WAYS[way].takes_content:
        content = ""
    text = content + WAYS[way].write(calls)
    before = content.rstrip("\n ")
    expected = ([("CONTENT", before)] if before else []) + told(calls)
    assert feed_all(parser(way), [text]) == expected
    assert feed_all(parser(way), text) == expected
    assert feed_all(parser(way), cut_at(text, cuts)) == expected


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([*MARKERS, "f", "get", "{", "}", '"name": "f"', ", ", '"arguments": {', '"', "\n"])))
@pytest.mark.parametrize("format", FORMATS)
def test_anything_at_all_is_read_alike_however_it_is_cut(format: str, words: list[str]) -> None:
    text = "".join(words)
    whole = feed_all(FORMATS[format].parser(TOOLS), [text])
    assert feed_all(FORMATS[format].parser(TOOLS), text) == whole
    assert feed_all(FORMATS[format].parser(TOOLS), words) == whole
    if not any(kind == "CALL" for kind, _ in whole):
        assert "".join(text for _, text in whole) == text


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("calls", [[("unknown", '{"a": 1}')], [("get_", "{}")]])
def test_a_call_of_an_unknown_tool_is_content(way: str, calls: list[Call]) -> None:
    text = WAYS[way].write(calls)
    assert_told(lambda: parser(way), text, [("CONTENT", text)])
    assert_told(lambda: parser(way), f"a \n{text} ", [("CONTENT", f"a \n{text} ")])


@pytest.mark.parametrize("way", WAYS)
def test_a_known_call_after_an_unknown_one_is_found(way: str) -> None:
    text = WAYS[way].write([("unknown", "{}")]) + "\n<tool_call>[TOOL_CALLS]<|python_tag|>"
    assert "".join(text for _, text in feed_all(parser(way), [text])) == text
    if WAYS[way].takes_content:
        text = WAYS[way].write([("unknown", "{}")])
        known = WAYS[way].write(EXAMPLES[0])
        assert_told(lambda: parser(way), f"{text} or {known}", [("CONTENT", f"{text} or"), *told(EXAMPLES[0])])


@pytest.mark.parametrize("way", WAYS)
def test_an_output_that_ends_too_early(way: str) -> None:
    """Calls that were told stay told, with as much of their arguments as there is; nothing raises."""
    text = WAYS[way].write(EXAMPLES[1])
    whole = [piece for piece in feed_all(parser(way), [text]) if piece[0] != "CONTENT"]
    for end in range(len(text)):
        cut = feed_all(parser(way), [text[:end]])
        assert feed_all(parser(way), text[:end]) == cut
        calls = [piece for piece in cut if piece[0] != "CONTENT"]
        for (kind, part), (whole_kind, whole_part) in zip(calls, whole, strict=False):
            assert kind == whole_kind
            assert whole_part.startswith(part)
        assert cut == calls or cut == [*calls, ("CONTENT", text[:end][-len(cut[-1][1]) :])]


PROSE = [
    "No call: <tool_ca and [TOOL_ and functools and <｜tool and {not json}.",
    "<tool_call> [TOOL_CALLS] functools[ <|python_tag|> <｜tool▁calls▁begin｜> <|tool_call|>",
    '{"answer": {"name": "f", "arguments": {}}}',
    '{"name": 1}',
    "{} [] {",
    "  \n ",
    "",
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("text", PROSE)
def test_what_is_no_call_is_given_back(format: str, text: str) -> None:
    assert_told(lambda: FORMATS[format].parser(TOOLS), text, [("CONTENT", text)] if text else [])


HERMES = FORMATS["hermes"]
LENIENT = {
    "reversed": ('<tool_call>\n{ "arguments": {"a": [1]}, "name": "f"}\n</tool_call> ', [("f", '{"a": [1]}')]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    "null": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    "empty": ('<tool_call>{"arguments": "", "name": "f"}</tool_call>', [("f", "{}")]),
    "other keys": ('<tool_call>{"id": 7, "name": "f", "arguments": {}, "x": [1]}</tool_call>', [("f", "{}")]),
    "no brace": ('<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', [("f", '{"a": 1}')]),
    "compact": ('<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', [("f", '{"a":1}')]),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    "escapes": ('<tool_call>{"n\\u0061me": "\\u0066", "arguments": {}}', [("f", "{}")]),
}


@pytest.mark.parametrize("case", LENIENT)
def test_small_slips_are_forgiven(case: str) -> None:
    text, calls = LENIENT[case]
    assert_told(lambda: HERMES.parser(TOOLS), text, told(calls))


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}",
        "[TOOL_CALLS]f{}",
        "[TOOL_CALLS] f [ARGS] {}",
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "a1B2c3D4e"}]',
    ],
)
def test_ways_of_mistral(text: str) -> None:
    assert_told(lambda: FORMATS["mistral"].parser(TOOLS), text, told([("f", "{}")]))


@pytest.mark.parametrize("arguments", ["[1]", "3", '"{}"', "tru e", "'a'"])
def test_arguments_that_are_no_object_make_no_call(arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert_told(lambda: HERMES.parser(TOOLS), text, [("CONTENT", text)])


def test_json_that_breaks_after_the_call_was_told() -> None:
    """What was told stays told, the rest is content."""
    text = '<tool_call>{"name": "f", "arguments": {"a": <oops>}}</tool_call> and'
    expected = [("CALL", "f"), ("ARGUMENTS", '{"a": '), ("CONTENT", "<oops>}}</tool_call> and")]
    assert_told(lambda: HERMES.parser(TOOLS), text, expected)


def test_arguments_stream_as_they_come() -> None:
    parser = HERMES.parser(TOOLS)
    assert parser.feed('Well.\n<tool_call>\n{"name": "f", "argu') == [(Kind.CONTENT, "Well.")]
    assert parser.region is Kind.CALL
    assert parser.feed('ments": ') == []
    assert parser.feed('{"a') == [(Kind.CALL, "f"), (Kind.ARGUMENTS, '{"a')]
    assert parser.feed('": "b') == [(Kind.ARGUMENTS, '": "b')]
    assert parser.feed('"}}\n</tool_call>') == [(Kind.ARGUMENTS, '"}')]
    assert parser.region is Kind.CALL
    assert parser.feed("\nx") == [(Kind.CONTENT, "x")]
    assert parser.region is Kind.CONTENT
    assert parser.finish() == []


def test_content_is_held_no_longer_than_needed() -> None:
    parser = HERMES.parser(TOOLS)
    assert parser.feed("a <tool_") == [(Kind.CONTENT, "a")]
    assert parser.feed("x") == [(Kind.CONTENT, " <tool_x")]
    assert parser.region is Kind.CONTENT


def test_json_content_of_llama_is_not_held_until_its_end() -> None:
    parser = FORMATS["llama3_json"].parser(TOOLS)
    assert parser.feed('{"answer"') == []
    assert parser.feed(': "long') == [(Kind.CONTENT, '{"answer": "long')]


@pytest.mark.parametrize(
    "write",
    [
        lambda size: WAYS["hermes"].write([("f", json.dumps({"a": '"' * (size // 3)}))]),
        lambda size: WAYS["hermes"].write([("f", json.dumps({"a": " <{" * (size // 3)}))]),
        lambda size: '<tool_call>{"arguments": {"a": "' + "{" * size,
        lambda size: " " * size,
        lambda size: "<tool_call>" * (size // 10),
    ],
    ids=["escapes", "markup", "held", "blanks", "openers"],
)
def test_200_kilobytes_take_linear_time(write: Callable[[int], str]) -> None:
    def parse(size: int) -> None:
        parser = HERMES.parser(TOOLS)
        for character in write(size):
            parser.feed(character)
        parser.finish()

    assert_linear(parse, 200_000)


@pytest.mark.parametrize("fragment", TEMPLATES)
def test_templates_are_recognized(fragment: str) -> None:
    users = [format.name for format in ALL if format.is_used_by(TEMPLATES[fragment])]
    assert users == [name for name in FORMATS if fragment.startswith(name)][-1:]
