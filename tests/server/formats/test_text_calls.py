"""Properties of every format whose calls are not JSON: of parsers for every cut of the text, and of grammars."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.linear_time import assert_linear
from tests.server.formats.text_calls_for_tests import (
    CALLS,
    PROSE,
    TOOLS,
    WRITERS,
    Call,
    Said,
    Writer,
    accepts,
    json_literal,
    parse,
    said_by_calls,
    write_pythonic,
)
from weft.server.formats.harmony import HARMONY
from weft.server.formats.parser import Kind
from weft.server.formats.pythonic_calls import PYTHONIC

CALL: list[Call] = [
    (
        "get_all",
        {"query": "a <b>\n'\"\\ é😀\n", "unit": "km", "since": None, "filter": {"inner": {"name": "中"}}, "limit": -5},
    ),
    ("ping", {}),
    ("get", {"key": ""}),
]
ORDERED: list[Call] = [
    (
        "get_all",
        {
            "query": "a <b>\n é😀\n",
            "limit": -5,
            "score": 2.5,
            "exact": True,
            "tags": ["x", "y\n"],
            "filter": {"inner": {}},
        },
    ),
    ("ping", {}),
]
_MARKERS = "<tool_call>", "</tool_call>", "<|call|>", "<|end|>"
BOTH = pytest.mark.parametrize("vocabulary", ["demo", "with markers"])
ONE_EACH = pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "harmony"])
EVERY = pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())


def _written(writer: Writer, calls: list[Call], before: str = "", after: str = "") -> tuple[str, Said]:
    """An output and what it says."""
    text = writer.write(calls)
    said = [*_content(before.rstrip()), *said_by_calls(calls), *_content(after.lstrip())]
    if writer.format is not HARMONY:
        return f"{before}{text}{after}", said
    preamble = f"<|channel|>commentary<|message|>{before}<|end|><|start|>assistant" if before else ""
    final = f"<|start|>assistant<|channel|>final<|message|>{after}" if after else ""
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    return f"{thought}{preamble}{text}{final}", [(Kind.REASONING, "Hm."), *said]


def _content(text: str) -> Said:
    return [(Kind.CONTENT, text)] if text else []


def _cut(text: str, cuts: set[int]) -> list[str]:
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


@settings(max_examples=120)
@given(name=st.sampled_from(sorted(WRITERS)), calls=CALLS, before=PROSE, after=PROSE, cuts=st.sets(st.integers(0, 400)))
def test_however_an_output_is_cut_it_says_the_same(
    name: str, calls: list[Call], before: str, after: str, cuts: set[int]
) -> None:
    writer = WRITERS[name]
    assume(writer.can_write(calls))
    assume(not after.strip() or not "<|python_end|>".startswith(after.strip()))  # that may be markup that is cut off
    text, said = _written(writer, calls, before, after)
    assert parse(writer.format.parser(TOOLS), [text]) == said
    assert parse(writer.format.parser(TOOLS), _cut(text, cuts)) == said


_SHREDS = {
    "minimax_m2": '<minimax:tool_call> </minimax:tool_call> <invoke name=" get ping"> "> </invoke> <parameter name=" '
    "key limit </parameter>",
    "olmo3": "<function_calls> </function_calls> get( ping( key= limit= ) , ' [ ] \\n null 1",
    "qwen3_coder": "<tool_call> </tool_call> <function= get> ping> </function> <parameter= key> limit> </parameter>",
    "glm_4_6": "<tool_call> </tool_call> get get_all ping <arg_key> key limit </arg_key> <arg_value> </arg_value>",
    "llama_4": "<|python_start|> <|python_end|> [ [get( [ping( key= limit= ) ] { } : , ' \" \\ \\u00 ''' None 1",
    "harmony": "<|start|> assistant <|channel|> analysis final commentary to= get functions.get <|constrain|> json "
    '<|message|> <|end|> <|call|> <|return|> { } " \\ key',
}


@settings(max_examples=100)
@given(data=st.data(), name=st.sampled_from(list(_SHREDS)), cuts=st.sets(st.integers(0, 200)))
def test_whatever_is_written_the_cut_makes_no_difference(data: st.DataObject, name: str, cuts: set[int]) -> None:
    """On cut calls and fragments of markup in any order nothing raises, and arguments follow calls."""
    format, written = WRITERS[name].format, WRITERS[name].write(CALL)
    shreds = [*_SHREDS[name].split(" "), "a", "5", "\n", " "]
    text = written[: data.draw(st.integers(0, len(written)))]
    text += "".join(data.draw(st.lists(st.sampled_from(shreds), min_size=1, max_size=14)))
    said = parse(format.parser(TOOLS), [text])
    assert parse(format.parser(TOOLS), text) == said
    assert parse(format.parser(TOOLS), _cut(text, cuts)) == said
    kinds = [kind for kind, _ in said]
    assert all(kinds[i + 1] is Kind.ARGUMENTS for i, kind in enumerate(kinds) if kind is Kind.CALL)
    assert all(kinds[i - 1] is Kind.CALL for i, kind in enumerate(kinds) if kind is Kind.ARGUMENTS)


@EVERY
def test_every_split_in_two_and_single_characters(writer: Writer) -> None:
    text, said = _written(writer, CALL, "Well <tool\n\n", "\n Done [get\n")
    assert parse(writer.format.parser(TOOLS), text) == said
    for cut in range(len(text)):
        assert parse(writer.format.parser(TOOLS), [text[:cut], text[cut:]]) == said


@ONE_EACH
def test_an_output_that_breaks_off_keeps_what_was_told(name: str) -> None:
    writer = WRITERS[name]
    text, said = _written(writer, CALL, "Well\n")
    for end in range(len(text)):
        got = parse(writer.format.parser(TOOLS), text[:end])
        assert got == parse(writer.format.parser(TOOLS), [text[:end]])
        whole = [entry for entry in said if entry[0] in (Kind.CALL, Kind.ARGUMENTS)]
        for (kind, part), (expected_kind, expected) in zip(
            [entry for entry in got if entry[0] in (Kind.CALL, Kind.ARGUMENTS)], whole, strict=False
        ):
            assert kind is expected_kind
            assert part == expected or kind is Kind.ARGUMENTS


@EVERY
def test_arguments_stream_while_they_come(writer: Writer) -> None:
    text = writer.write([("get", {"key": "x" * 100})])
    parser = writer.format.parser(TOOLS)
    told = [len("".join(p.text for p in parser.feed(char) if p.kind is Kind.ARGUMENTS)) for char in text]
    first = text.index("xxx")
    assert sum(told[: first + 100]) >= len('{"key": "') + 99
    assert max(told) < 20
    parser.finish()


@EVERY
def test_a_tool_that_was_not_declared_is_content_as_it_was_written(writer: Writer) -> None:
    text = writer.write([("nope", {"key": "x\n"})])
    for pieces in ([text], list(text)):
        assert parse(writer.format.parser(TOOLS), pieces) == [(Kind.CONTENT, text)]
        assert parse(writer.format.parser(()), pieces) == [(Kind.CONTENT, text)]


@ONE_EACH
def test_a_long_argument_takes_linear_time(name: str) -> None:
    writer = WRITERS[name]

    def parse(size: int) -> None:
        value = "ab\n< ]" * size
        text = writer.write([("get", {"key": value})])
        parser = writer.format.parser(TOOLS)
        told = [piece.text for char in text for piece in parser.feed(char) if piece.kind is Kind.ARGUMENTS]
        assert json.loads("".join(told)) == {"key": value}

    assert_linear(parse, 30_000)


@pytest.mark.parametrize("name", sorted(WRITERS))
@BOTH
@settings(max_examples=5, deadline=None)
@given(calls=CALLS)
def test_the_grammar_accepts_every_call(name: str, vocabulary: str, calls: list[Call]) -> None:
    """Arguments in the order of the schema; a marker in a value of a model that has it as a token cannot be written."""
    writer = WRITERS[name]
    if name == "pythonic":
        writer = Writer(PYTHONIC, lambda calls: write_pythonic(calls, json_literal))
    calls = [(tool, _in_order(arguments)) for tool, arguments in calls]
    values = json.dumps([arguments for _, arguments in calls], ensure_ascii=False)
    assume(writer.can_write(calls) and not any(marker in values for marker in _MARKERS))
    assert accepts(writer.format, vocabulary, writer.write(calls))
    assert accepts(writer.format, vocabulary, writer.write(calls), is_required=True)
    assert accepts(writer.format, vocabulary, writer.write(calls[:1]), content="yes_or_no", allows_many=False)


def _in_order(arguments: dict[str, Any]) -> dict[str, Any]:
    """The order of the schema, in which grammars want arguments."""
    order = [*TOOLS[2].parameters["properties"], "key", "inner", "name"]
    return {
        key: _in_order(arguments[key]) if isinstance(arguments[key], dict) else arguments[key]
        for key in order
        if key in arguments
    }


@BOTH
@EVERY
def test_the_grammar_refuses_what_is_no_such_call(writer: Writer, vocabulary: str) -> None:
    text = writer.write(ORDERED)
    if writer.format is PYTHONIC:
        text = f"[{write_pythonic(ORDERED, json_literal)[1:]}"
    bad = {
        "an undeclared name": text.replace("ping", "pong"),
        "an undeclared parameter": text.replace("tags", "tugs"),
        "a wrong type": text.replace("-5", "five"),
        "a number for an integer": text.replace("-5", "-5.5"),
        "a missing required parameter": writer.write([("get", {})]),
        "a wrong member": text.replace("inner", "outer"),
        "text behind the last call": f"{text} Done",
        "a call that breaks off": text[: len(text) // 2],
    }
    assert accepts(writer.format, vocabulary, text, is_required=True)
    for what, bad_text in bad.items():
        assert bad_text != text
        assert not accepts(writer.format, vocabulary, bad_text, is_required=True), what
        if writer.format is not PYTHONIC and what != "text behind the last call":  # else no call opens: it is text
            assert not accepts(writer.format, vocabulary, bad_text), what
    assert not accepts(writer.format, vocabulary, text, is_required=True, allows_many=False)


@BOTH
@EVERY
def test_who_must_call_cannot_just_talk_and_who_may_can_do_both(writer: Writer, vocabulary: str) -> None:
    format, call = writer.format, writer.write([("ping", {})])
    final = "<|channel|>final<|message|>" if format is HARMONY else ""
    plain = f"{final}Hello, [you](a) <b> 1 < 2.\n"
    spoken = f"Let me see.\n{call}"
    if format is HARMONY:
        spoken = f"<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{call}"
    assert accepts(format, vocabulary, plain)
    assert accepts(format, vocabulary, spoken)
    assert not accepts(format, vocabulary, plain, is_required=True)
    assert not accepts(format, vocabulary, spoken, is_required=True)
    assert accepts(format, vocabulary, f"{final}true", content="yes_or_no")
    assert not accepts(format, vocabulary, plain, content="yes_or_no")
    assert accepts(format, vocabulary, call, content="yes_or_no")
    assert not accepts(format, vocabulary, f"{final}true", content="yes_or_no", is_required=True)
