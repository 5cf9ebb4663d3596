import pytest

from tests.server.formats.text_calls_for_tests import TOOLS, Said, accepts, parse
from weft.server.formats.harmony import HARMONY
from weft.server.formats.parser import Kind, Tool

GPT_OSS_TEMPLATE = r"""
{{- "<|start|>assistant to=" }}{{- "functions." + tool_call.name + "<|channel|>commentary " }}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
"""
GET = (Tool("get", TOOLS[1].parameters),)
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def _said(text: str, tools: tuple[Tool, ...] = TOOLS) -> Said:
    said = parse(HARMONY.parser(tools), [text])
    assert parse(HARMONY.parser(tools), text) == said
    return said


def test_the_template_tells_the_format() -> None:
    assert HARMONY.is_used_by(GPT_OSS_TEMPLATE)
    assert not HARMONY.is_used_by("<|start|>{{ role }}<|message|>")


def test_channels_without_tools() -> None:
    text = f"{THOUGHT}<|channel|>final<|message|>2 + 2 = 4.\n<|return|>"
    assert _said(text, ()) == [(Kind.REASONING, "Hm."), (Kind.CONTENT, "2 + 2 = 4.\n")]


def test_a_line_break_is_between_messages_of_one_kind() -> None:
    plan = "<|channel|>commentary<|message|>Plan<|end|><|start|>assistant"
    text = f"{THOUGHT}{THOUGHT}{plan}<|channel|>final<|message|>Done"
    assert _said(text) == [(Kind.REASONING, "Hm.\nHm."), (Kind.CONTENT, "Plan\nDone")]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get <|constrain|>json",
        "<|channel|>commentary to=functions.get<|constrain|>json",
        "<|channel|>commentary to=get code",
        "<|channel|>analysis to=functions.get code",
        " to=functions.get<|channel|>commentary json",
        " to=functions.get<|channel|>commentary <|constrain|>json",
        "<|start|>assistant to=functions.get<|channel|>commentary",
    ],
)
def test_every_header_that_models_write_for_a_call(header: str) -> None:
    call = [(Kind.CALL, "get"), (Kind.ARGUMENTS, '{"key": "<|call|>\\"\\\\"}')]
    assert _said(f'{header}<|message|>\n{{"key": "<|call|>\\"\\\\"}}<|call|>') == call
    if not header.startswith("<|start|>"):
        assert _said(f'{THOUGHT}{header}<|message|>{{"key": "<|call|>\\"\\\\"}}') == [(Kind.REASONING, "Hm."), *call]


def test_a_call_without_arguments() -> None:
    text = "<|channel|>commentary to=functions.ping<|message|><|call|>"
    assert _said(text) == [(Kind.CALL, "ping"), (Kind.ARGUMENTS, "{}")]


def test_numbers_that_json_lacks_are_null() -> None:
    text = '<|channel|>commentary to=get<|message|>{"key": [NaN, -Infinity, Infinity, -1, "NaN"]}<|call|>'
    assert _said(text) == [(Kind.CALL, "get"), (Kind.ARGUMENTS, '{"key": [null, null, null, -1, "NaN"]}')]


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        "to be",
        "1 < 2",
        "<|channel|>commentary to=python code<|message|>print(1)<|call|>",
        "<|channel|>commentary to=functions.get<|message|> oh <|call|>",
        "<|channel|><|start|> oh no",
        "<|start|> is how a message begins",
    ],
)
def test_what_is_neither_message_nor_call_is_content(text: str) -> None:
    assert _said(text) == [(Kind.CONTENT, text)]


def test_a_header_that_never_ends_is_content() -> None:
    text = "<|channel|>" + "a" * 5000
    assert _said(text) == [(Kind.CONTENT, text)]


@pytest.mark.parametrize("header", ["<|channel|>anal", "<|start|>assistant<|cha", f"{THOUGHT}<|channel|>final<|mess"])
def test_a_header_that_is_cut_off_is_no_content(header: str) -> None:
    assert [text for kind, text in _said(header) if kind is Kind.CONTENT] == []


def test_a_message_may_lack_its_end() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes"
    assert _said(text) == [(Kind.REASONING, "Hm."), (Kind.CONTENT, "Yes")]


def test_region_follows_the_text() -> None:
    parser = HARMONY.parser(GET)
    regions = []
    for text in (THOUGHT[:-18], "<|end|><|start|>assistant<|channel|>commentary to=get<|message|>{", "}<|call|>"):
        parser.feed(text)
        regions.append(parser.region)
    assert regions == [Kind.REASONING, Kind.CALL, Kind.CALL]


@pytest.mark.parametrize("vocabulary", ["demo", "with markers"])
def test_the_grammar_covers_the_whole_output(vocabulary: str) -> None:
    assert accepts(HARMONY, vocabulary, f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>Hello")
    assert accepts(HARMONY, vocabulary, "<|channel|>final<|message|>true", content="yes_or_no", tools=())
    assert not accepts(HARMONY, vocabulary, "<|channel|>final<|message|>Hello", content="yes_or_no", tools=())
    assert not accepts(HARMONY, vocabulary, THOUGHT)
    assert not accepts(HARMONY, vocabulary, "Hello")
    assert not accepts(HARMONY, vocabulary, "<|channel|>commentary to=python<|message|>{}")
