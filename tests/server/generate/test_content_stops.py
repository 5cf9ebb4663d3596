"""Stop strings end content, and leave reasoning and calls alone, for every way to cut the text."""

import pytest

from tests.server.conftest import ByteDetokenizer
from weft.engine.shared.messages import FinishReason, TokensOutput
from weft.server.formats.json_calls import HERMES
from weft.server.formats.parser import OutputParser, Tool
from weft.server.formats.reasoning import THINK, Block
from weft.server.generate.choice_stream import ChoiceStream, TextOptions
from weft.server.generate.content_stops import ContentStops
from weft.server.generate.parsed_choice import Message, ParsedChoice
from weft.server.text.stop_strings import StopStrings

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x\\n."}}\n</tool_call>'


def parser() -> OutputParser:
    return THINK.parser(Block.NOT_BEGUN, HERMES.parser([Tool("f", {})]))


def answer(text: str, stop: str, size: int, *, include: bool = False, min_tokens: int = 0) -> tuple[Message, object]:
    stops = ContentStops(parser(), StopStrings([stop], include))
    stream = ChoiceStream(ByteDetokenizer(True), stops, TextOptions(include_stop=include, min_tokens=min_tokens))
    parsed, message = ParsedChoice(parser()), Message()
    ids = list(text.encode())
    for start in range(0, len(ids), size):
        is_last = start + size >= len(ids)
        output = TokensOutput(0, 0, ids[start : start + size], FinishReason.LENGTH if is_last else None)
        delta = stream.feed(output)
        if delta is None:
            continue
        for piece in parsed.feed(delta)[0]:
            message.add(piece)
        if delta.finish_reason is not None:
            return message, delta.stop_reason or delta.finish_reason
    raise AssertionError("the choice has no end")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "stop", "content", "num_calls", "reason"),
    [
        (f"<think>a.b</think>Hi.{CALL}", ".", "Hi", 0, "."),
        (f"<think>a.b</think>Hi{CALL}", ".", "Hi", 1, FinishReason.LENGTH),
        (f"<think>a.b</think>Hi {CALL}", "<", "Hi", 1, FinishReason.LENGTH),
        (f"{CALL}", "\n", "", 1, FinishReason.LENGTH),
        ("<think>a</think>.Hi", ".", "", 0, "."),
        ("Hi <tool <3 ho", "<3", "Hi <tool ", 0, "<3"),
        ("one two", "o t", "one two", 0, FinishReason.LENGTH),
    ],
)
def test_only_content_is_searched(
    text: str, stop: str, content: str, num_calls: int, reason: object, size: int
) -> None:
    message, ended_by = answer(text, stop, size)
    assert (message.content, len(message.calls), ended_by) == (content, num_calls, reason)
    assert message.reasoning == ("" if "<think>" not in text else text[7 : text.index("</think>")])
    assert all(call.arguments == '{"a": "x\\n."}' for call in message.calls)


def test_a_stop_string_may_be_kept() -> None:
    assert answer("<think>.</think>a.b", ".", 2, include=True)[0].content == "a."


def test_the_first_tokens_are_passed_over() -> None:
    message, reason = answer("a.b.c", ".", 1, min_tokens=2)
    assert (message.content, reason) == ("a.b", ".")
