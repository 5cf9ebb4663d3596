"""What tokens are spent on, for every way in which the engine's outputs merge; what stop strings end."""

import itertools

import pytest

from tests.server.conftest import ByteDetokenizer
from weft.engine.wire.messages import FinishReason, TokensOutput
from weft.server.formats.json_calls import HERMES
from weft.server.formats.parser import OutputParser, Tool
from weft.server.formats.reasoning import THINK, ReasoningBlock
from weft.server.generate.choice_stream import ChoiceStream
from weft.server.generate.events import (
    CallArguments,
    CallClosed,
    CallOpened,
    End,
    Event,
    Text,
    Token,
    WholeChoice,
    whole_choice,
)
from weft.server.generate.output_plan import ParsedChoice
from weft.server.task.task import TextOptions

TOKENS = ["<th", "ink>", "\nwhy", "\n</think>", "\n\n", "Hi", " <", "3", " <tool", "_call>", '{"name": "f",']
TOKENS += [' "arguments": {"a"', ": 1}}", "</tool_call>"]
STARTS = list(itertools.accumulate(map(len, TOKENS), initial=0))
STOP = End(FinishReason.STOP)


def parser() -> OutputParser:
    return THINK.parser(ReasoningBlock.NOT_BEGUN, HERMES.parser([Tool("f", {})]))


def feed(parsed: ParsedChoice, first: int, end: int) -> list[Event]:
    tokens = [Token(index, STARTS[index], None) for index in range(first, end)]
    return parsed.feed("".join(TOKENS[first:end]), tokens, STOP if end == len(TOKENS) else None)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, len(TOKENS)])
def test_tokens_count_as_what_their_text_is(size: int, is_whole: bool) -> None:
    parsed, told = ParsedChoice(parser(), TextOptions(), is_whole=is_whole), list[Event]()
    for first in range(0, len(TOKENS), size):
        events = feed(parsed, first, min(first + size, len(TOKENS)))
        assert all(type(a) is not type(b) for a, b in itertools.pairwise(events))
        assert events == [] or not is_whole or events[-1] == STOP
        told += events
    choice = whole_choice(0, told)
    assert (choice.reasoning, choice.text) == ("why", "Hi <3")
    assert choice.calls == [CallClosed("f", '{"a": 1}')]
    assert [TOKENS[token.token_id] for token in choice.tokens] == ["Hi", " <", "3"]
    assert parsed.num_reasoning_tokens == 5


def test_a_call_is_opened_told_and_closed() -> None:
    parsed = ParsedChoice(parser(), TextOptions())
    told = [event for i in range(8, len(TOKENS)) for event in parsed.feed(TOKENS[i], [], None)]
    told += parsed.feed("</tool_call>" + "".join(TOKENS[8:]), [], STOP)
    kinds = [kind for kind, _ in itertools.groupby(type(event) for event in told)]
    assert kinds == [CallOpened, CallArguments, CallClosed] * 2 + [End]


def test_what_is_held_at_the_end_is_content() -> None:
    tokens = [Token(0, 0, None), Token(1, 2, None)]
    end = End(FinishReason.LENGTH)
    assert ParsedChoice(parser(), TextOptions()).feed("Hi <tool", tokens, end) == [Text("Hi <tool", tokens), end]


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x\\n."}}\n</tool_call>'


def answer(text: str, stop: str, size: int, *, include: bool = False, min_tokens: int = 0) -> tuple[WholeChoice, int]:
    """The choice, and how many of its tokens count; each character is a token."""
    options = TextOptions(stops=[stop], include_stop=include, min_tokens=min_tokens, tracks_tokens=True)
    stream = ChoiceStream(ByteDetokenizer(True), options, ParsedChoice(parser(), options))
    ids, told = list(text.encode()), list[Event]()
    for start in range(0, len(ids), size):
        reason = FinishReason.LENGTH if start + size >= len(ids) else None
        told += stream.feed(TokensOutput(0, 0, ids[start : start + size], reason)) or []
        if stream.is_finished:
            return whole_choice(0, told), stream.num_output_tokens
    raise AssertionError("the choice has no end")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "stop", "content", "num_calls", "reason"),
    [
        (f"<think>a.b</think>Hi.{CALL}", ".", "Hi", 0, "."),
        (f"<think>a.b</think>Hi{CALL}", ".", "Hi", 1, None),
        (f"<think>a.b</think>Hi {CALL}", "<", "Hi", 1, None),
        (f"<think>a.b</think>Hi{CALL}", "i!", "Hi", 1, None),
        (f"{CALL}", "\n", "", 1, None),
        ("<think>a</think>.Hi", ".", "", 0, "."),
        ("Hi <tool <3 ho", "<3", "Hi <tool ", 0, "<3"),
        ("one two", "o t", "one two", 0, None),
    ],
)
def test_only_content_is_searched(
    text: str, stop: str, content: str, num_calls: int, reason: str | None, size: int
) -> None:
    choice, num_tokens = answer(text, stop, size)
    assert num_tokens == (len(text) if reason is None else text.index(content + reason) + len(content + reason))
    assert (choice.text, len(choice.calls), choice.end.stop_reason) == (content, num_calls, reason)
    assert choice.end.reason is (FinishReason.LENGTH if reason is None else FinishReason.STOP)
    assert choice.reasoning == ("" if "<think>" not in text else text[7 : text.index("</think>")])
    assert all(call.arguments == '{"a": "x\\n."}' for call in choice.calls)


def test_a_stop_string_may_be_kept() -> None:
    assert answer("<think>.</think>a.b", ".", 2, include=True)[0].text == "a."


def test_the_first_tokens_are_passed_over() -> None:
    choice = answer("a.b.c", ".", 1, min_tokens=2)[0]
    assert (choice.text, choice.end.stop_reason) == ("a.b", ".")
