"""Feeds a parser the same text cut in every way, and joins what it tells."""

import itertools
from collections.abc import Callable, Iterable, Sequence

from weft.server.formats.parser import Kind, OutputParser, Piece

Make = Callable[[], OutputParser]


def feed_all(parser: OutputParser, parts: Iterable[str]) -> list[tuple[str, str]]:
    """What was told, with neighbours of the same kind joined. No single answer may have such neighbours."""
    told: list[Piece] = []
    for part in parts:
        told += _checked(parser.feed(part)) if part else []
    told += _checked(parser.finish())
    assert parser.finish() == []
    joined: list[tuple[str, str]] = []
    for kind, text in told:
        if joined and kind is not Kind.CALL and joined[-1][0] == kind.name:
            joined[-1] = kind.name, joined[-1][1] + text
        else:
            joined.append((kind.name, text))
    return joined


def _checked(pieces: Sequence[Piece]) -> Sequence[Piece]:
    assert all(piece.text for piece in pieces)
    for first, second in itertools.pairwise(pieces):
        assert first.kind is not second.kind or first.kind is Kind.CALL
    return pieces


def assert_told(make: Make, text: str, expected: list[tuple[str, str]]) -> None:
    """Check what is told of the text as a whole, character by character, and cut in two at every place."""
    assert feed_all(make(), [text]) == expected
    assert feed_all(make(), text) == expected
    for cut in range(1, len(text)):
        told = feed_all(make(), [text[:cut], text[cut:]])
        assert told == expected, f"cut at {cut}: {text[:cut]!r} | {text[cut:]!r}"


def cut_at(text: str, cuts: Iterable[int]) -> list[str]:
    """The text in pieces, cut at these places, which may repeat or lie outside."""
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]
