"""What tokens are spent on, for every way in which the engine's outputs merge."""

import itertools

import pytest

from weft.engine.shared.messages import FinishReason
from weft.server.formats.json_calls import HERMES
from weft.server.formats.parser import Kind, Tool
from weft.server.formats.reasoning import THINK, Block
from weft.server.generate.choice_stream import Delta, Token
from weft.server.generate.parsed_choice import Message, ParsedChoice

TOKENS = ["<th", "ink>", "\nwhy", "\n</think>", "\n\n", "Hi", " <", "3", " <tool", "_call>", '{"name": "f",']
TOKENS += [' "arguments": {"a"', ": 1}}", "</tool_call>"]
STARTS = list(itertools.accumulate(map(len, TOKENS), initial=0))


def choice() -> ParsedChoice:
    return ParsedChoice(THINK.parser(Block.NOT_BEGUN, HERMES.parser([Tool("f", {})])))


def delta(first: int, end: int) -> Delta:
    tokens = [Token(index, STARTS[index], None) for index in range(first, end)]
    return Delta("".join(TOKENS[first:end]), tokens, FinishReason.STOP if end == len(TOKENS) else None)


@pytest.mark.parametrize("size", [1, 2, 3, 5, len(TOKENS)])
def test_tokens_count_as_what_their_text_is(size: int) -> None:
    parsed, message, content = choice(), Message(), []
    for first in range(0, len(TOKENS), size):
        pieces, tokens = parsed.feed(delta(first, min(first + size, len(TOKENS))))
        assert all(a.kind is not b.kind or a.kind is Kind.CALL for a, b in itertools.pairwise(pieces))
        content += [TOKENS[token.token_id] for token in tokens]
        for piece in pieces:
            message.add(piece)
    assert (message.reasoning, message.content) == ("why", "Hi <3")
    assert [(call.name, call.arguments) for call in message.calls] == [("f", '{"a": 1}')]
    assert content == ["Hi", " <", "3"]
    assert parsed.num_reasoning_tokens == 5
    assert parsed.num_calls == 1


def test_what_is_held_at_the_end_is_content() -> None:
    parsed = choice()
    tokens = [Token(0, 0, None), Token(1, 2, None)]
    pieces, content = parsed.feed(Delta("Hi <tool", tokens, FinishReason.LENGTH))
    assert [(piece.kind, piece.text) for piece in pieces] == [(Kind.CONTENT, "Hi <tool")]
    assert content == tokens
