"""Grammars against real matchers over two tokenizers: one has the markers as tokens, one spells them."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import llguidance
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.formats.call_formats import WAYS, Call
from tests.tokenizers_for_tests import CHATML_SPECIAL, byte_level
from weft.server.formats import grammar as lark
from weft.server.formats import json_calls, reasoning
from weft.server.formats.parser import AnswerRules, Mark, Tool
from weft.server.formats.reasoning import ReasoningBlock, ReasoningFormat

FORMATS = {format.name: format for format in json_calls.ALL}
REASONING = {format.name: format for format in reasoning.ALL}
MARKERS = sorted({marker for format in (*json_calls.ALL, *reasoning.ALL) for marker in format.markers})
TOOLS = [
    Tool("get", {"type": "object", "properties": {}}),
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}, "more": {"type": "object"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "array", "items": {"type": "integer"}}},
        },
    ),
    Tool("open", {"type": "object", "properties": {"a": {"enum": ["x", None]}}, "additionalProperties": True}),
]
DEMO = Path(__file__).parents[3] / "server" / "demo_model" / "tokenizer.json"


@cache
def backend(kind: str) -> tokenizers.Tokenizer:
    if kind == "demo":
        return tokenizers.Tokenizer.from_file(str(DEMO))
    made = byte_level((*CHATML_SPECIAL, *(marker for marker in MARKERS if marker[0] in "<[")))
    made.add_tokens([tokenizers.AddedToken(text, special=False) for text in ('"}}', '", "', '": "', "}\n", ' {"')])
    return made  # tokens that reach over the ends of JSON


@cache
def vocabulary(kind: str) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(backend(kind).to_str())


def marker_of(kind: str) -> Mark:
    def mark(marker: str) -> str:
        token_id = backend(kind).token_to_id(marker)
        return lark.literal(marker) if token_id is None else f"<[{token_id}]>"

    return mark


@cache
def compiled(kind: str, grammar: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(vocabulary(kind), grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(kind: str, grammar: str, text: str) -> bool:
    matcher = compiled(kind, grammar).deep_copy()
    token_ids = backend(kind).encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


Accepts = Callable[..., bool]


@pytest.fixture(params=["demo", "markers"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def grammar_of(way: str, kind: str, is_required: bool, allows_many: bool, schema: str | None) -> str:
    grammar = FORMATS[WAYS[way].format].grammar(
        AnswerRules(TOOLS, marker_of(kind), "data" if schema else None, is_required, allows_many)
    )
    return f"start: answer\n{grammar}" + (f"data: {lark.json_value(json.loads(schema))}\n" if schema else "")


@pytest.fixture
def takes(way: str, kind: str) -> Accepts:
    def takes(text: str, is_required: bool = False, allows_many: bool = True, schema: str | None = None) -> bool:
        return accepts(kind, grammar_of(way, kind, is_required, allows_many, schema), text)

    return takes


GOOD: list[Call] = [
    ("get", "{}"),
    ("get_weather", '{"city": "Graz \\"}{ é中😀 \\n</b>", "days": [1, -2]}'),
    ("get_weather", '{"city": "", "more": {"x": [{"y": null}, 1.5, true]}}'),
    ("open", '{"a": null, "b": [], "c": {}}'),
]
BAD: dict[str, Call] = {
    "unknown name": ("gets", "{}"),
    "part of a name": ("get_", "{}"),
    "arguments of none": ("get", '{"a": 1}'),
    "missing key": ("get_weather", '{"days": []}'),
    "wrong type": ("get_weather", '{"city": 1}'),
    "wrong type behind a reference": ("get_weather", '{"city": "a", "days": ["b"]}'),
    "other key": ("get_weather", '{"city": "a", "b": 1}'),
    "not in the enum": ("open", '{"a": "y"}'),
    "compact": ("get_weather", '{"city":"a"}'),
    "spaces": ("get_weather", '{ "city": "a" }'),
    "newline": ("get_weather", '{"city": "a",\n"days": []}'),
    "no object": ("get", "[]"),
}
every_way = pytest.mark.parametrize("way", WAYS)


@every_way
def test_calls_as_templates_write_them(takes: Accepts, way: str) -> None:
    for call in GOOD:
        for is_required in (True, False):
            for allows_many in (True, False):
                assert takes(WAYS[way].write([call]), is_required, allows_many)
    assert takes(WAYS[way].write(GOOD))
    assert takes(WAYS[way].write(GOOD), is_required=True)


@every_way
def test_markers_in_strings(takes: Accepts, way: str, kind: str) -> None:
    """A marker in a string is spelled as text; its token cannot stand in a string."""
    text = WAYS[way].write([("get_weather", '{"city": "[TOOL_CALLS]]}"}')])
    assert takes(text) is (kind == "demo")


@every_way
def test_what_is_no_call_of_these_tools_is_refused(takes: Accepts, way: str) -> None:
    for reason, call in BAD.items():
        assert not takes(WAYS[way].write([call]), is_required=True), reason
        assert not takes(WAYS[way].write([call])), reason
        assert not takes(WAYS[way].write([GOOD[0], call])), reason


@every_way
def test_nothing_but_calls_follows_a_call(takes: Accepts, way: str) -> None:
    one, two = WAYS[way].write(GOOD[:1]), WAYS[way].write(GOOD[:2])
    for text in (f"{one} and", f"{one}\n", f"{one}{one}x"):
        assert not takes(text)
        assert not takes(text, is_required=True)
        assert not takes(text, is_required=True, allows_many=False)
    assert not takes(two, allows_many=False)
    assert not takes(two, is_required=True, allows_many=False)


@every_way
def test_required_and_automatic(takes: Accepts, way: str) -> None:
    call = WAYS[way].write(GOOD[:2])
    for text in ("", "Hello, <b>you</b> [and] {me}.\n", " \n", "<tool_cal", "中"):
        assert takes(text)
        assert not takes(text, is_required=True)
        if WAYS[way].takes_content:
            assert takes(f"{text}{call}")
            assert takes(f"{text}\n{call}")
        assert not takes(f"x{text}{call}", is_required=True)
    assert not takes("{not a call}") or way not in ("llama3_json", "llama3_json_tag")


@every_way
def test_content_that_has_a_schema(takes: Accepts, way: str) -> None:
    schema = '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}'
    assert takes('{"x": 1}', schema=schema)
    assert takes(WAYS[way].write(GOOD[:1]), schema=schema)
    assert not takes("Hello", schema=schema)
    assert not takes(f'{{"x": 1}}{WAYS[way].write(GOOD[:1])}', schema=schema)
    assert not takes('{"x": 1}', schema=schema, is_required=True)


@settings(max_examples=25, deadline=None)
@given(
    st.text(max_size=8),
    st.lists(st.integers(-(10**6), 10**6), max_size=3),
    st.dictionaries(st.text('ab"\\\n é中', max_size=4), st.text(max_size=4) | st.booleans() | st.none(), max_size=3),
    st.sampled_from(list(WAYS)),
    st.sampled_from(["demo", "markers"]),
)
def test_random_arguments(city: str, days: list[int], more: dict[str, object], way: str, kind: str) -> None:
    arguments = json.dumps({"city": city, "days": days, "more": more}, ensure_ascii=False)
    if "\x7f" not in arguments:  # `llguidance` wants it escaped, which no template does
        text = WAYS[way].write([("get_weather", arguments), ("get", "{}")])
        assert accepts(kind, grammar_of(way, kind, True, True, None), text)


@pytest.mark.parametrize("format", REASONING.values(), ids=REASONING)
def test_reasoning_before_an_answer(kind: str, format: ReasoningFormat) -> None:
    def takes(block: ReasoningBlock, text: str) -> bool:
        grammar = format.grammar(block, marker_of(kind))
        return accepts(kind, f'start: reasoning answer\n{grammar}answer: %json {{"type": "integer"}}\n', text)

    almost = format.end[:3] if format.tokens else format.end[:-1]  # a token cannot stand in a thought
    thought = f"\nMany\n\nthoughts <b> {almost} 7\n"
    for newlines in ("", "\n", "\n\n"):
        assert takes(ReasoningBlock.NOT_BEGUN, f"{format.begin}{thought}{format.end}{newlines}7")
        assert takes(ReasoningBlock.OPEN, f"{thought}{format.end}{newlines}7")
    assert takes(ReasoningBlock.NOT_BEGUN, "7")
    assert takes(ReasoningBlock.CLOSED, "7")
    assert takes(ReasoningBlock.OPEN, f"{format.end}7")
    assert not takes(ReasoningBlock.OPEN, "7")
    assert not takes(ReasoningBlock.CLOSED, f"{format.begin}{thought}{format.end}7")
    assert not takes(ReasoningBlock.OPEN, f"{thought}{format.end}\nso: 7")
    assert not takes(ReasoningBlock.OPEN, f"{thought}{format.end}{thought}{format.end}7")
    assert not takes(ReasoningBlock.NOT_BEGUN, f"{format.begin}{thought}7")


@pytest.mark.parametrize("format", [format for format in REASONING.values() if format.answer_end], ids=lambda f: f.name)
@pytest.mark.parametrize("block", ReasoningBlock)
def test_an_answer_may_have_its_markers(kind: str, format: ReasoningFormat, block: ReasoningBlock) -> None:
    grammar = f'start: reasoning answer closing\n{format.grammar(block, marker_of(kind))}answer: %json {{"const": 7}}\n'
    thought = {ReasoningBlock.NOT_BEGUN: f"{format.begin}a{format.end}\n", ReasoningBlock.OPEN: f"a{format.end}\n"}
    before = thought.get(block, "")
    assert accepts(kind, grammar, f"{before}7")
    assert accepts(kind, grammar, f"{before}{format.answer_begin}7{format.answer_end}")
    assert accepts(kind, grammar, f"{before}{format.answer_begin}\n7\n{format.answer_end}")
    assert not accepts(kind, grammar, f"{before}{format.answer_begin}8{format.answer_end}")
    assert not accepts(kind, grammar, f"{before}{format.answer_begin}")


def test_reasoning_before_calls(kind: str) -> None:
    for is_required in (True, False):
        wanted = AnswerRules(TOOLS, marker_of(kind), is_required=is_required)
        grammar = "start: reasoning answer\n" + json_calls.HERMES.grammar(wanted)
        grammar += reasoning.THINK.grammar(ReasoningBlock.OPEN, marker_of(kind))
        call = WAYS["hermes"].write(GOOD[:1])
        assert accepts(kind, grammar, f"Hm <b>\n</think>\n\n{call}")
        assert accepts(kind, grammar, "Hm</think>\n\nNo.") is not is_required
        assert not accepts(kind, grammar, f"Hm\n{call}")


def test_a_marker_cannot_be_spelled_past_its_token() -> None:
    grammar = "start: up\n" + lark.text_up_to("up", "</think>", marker_of("markers"))
    matcher = llguidance.LLMatcher(vocabulary("markers"), grammar)
    spelled = [token_id for part in ("a</", "think>") for token_id in backend("markers").encode(part).ids]
    assert matcher.try_consume_tokens(spelled) == len(spelled) - 1
    assert matcher.consume_token(backend("markers").token_to_id("</think>"))
    assert matcher.is_accepting()


@pytest.mark.parametrize("text", ["a", '"\\\n\t/#', "é中😀", "\x7f\x00", "<|x|>"])
def test_literals(text: str) -> None:
    """A literal matches its text and nothing else."""
    assert accepts("demo", f"start: {lark.literal(text)}", text)
    assert not accepts("demo", f"start: {lark.literal(text)}", text + "a")


@pytest.mark.parametrize("text", ["2024-02-29", "2000-02-29", "2023-02-28", "0001-01-31", "9999-12-31", "2023-04-30"])
@pytest.mark.parametrize(("name", "rest"), [("date", ""), ("date-time", "T23:59:59Z")])
def test_days_of_the_calendar(name: str, rest: str, text: str) -> None:
    schema = {"items": {"type": "string", "format": name}, "maxItems": 1}
    assert accepts("demo", f"start: {lark.json_value(schema)}", f'["{text}{rest}"]')


@pytest.mark.parametrize("text", ["0000-01-01", "2023-02-29", "1900-02-29", "2024-02-30", "2023-04-31", "2023-13-01"])
@pytest.mark.parametrize(("name", "rest"), [("date", ""), ("date-time", "T23:59:59Z")])
def test_days_that_never_were_are_refused(name: str, rest: str, text: str) -> None:
    """Python and with it Pydantic know no year 0 and no 29 February 2023, which RFC 3339's syntax allows."""
    schema = {"items": {"type": "string", "format": name}, "maxItems": 1}
    assert not accepts("demo", f"start: {lark.json_value(schema)}", f'["{text}{rest}"]')


def test_arguments_are_held_to_their_schema_as_answers_are() -> None:
    """Schemas of arguments were left open: a model could add undeclared members without end."""
    tool = Tool("f", {"properties": {"a": {"type": "integer"}}, "required": ["a"]})
    grammar = f"start: {lark.arguments(tool)}"
    assert accepts("demo", grammar, '{"a": 1}')
    assert not accepts("demo", grammar, '{"a": 1, "b": 2}')
