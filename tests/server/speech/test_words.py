"""Tokens become words, each with the marks around it."""

import itertools
from typing import Any

import pytest

from tests.server.conftest import ByteTokenizer
from weft.server.speech.words import Word, _words, timed_words


@pytest.mark.parametrize(
    ("text", "language", "words"),
    [
        (" The beach, he said.", "en", ["The", "beach,", "he", "said."]),
        (' "Well" (no', None, ['"Well"', "(no"]),
        (" ¿Qué pasó?", "es", ["¿Qué", "pasó?"]),
        (" 12.5 it's", "en", ["12.5", "it's"]),
        ("你好\uff0c世界", "zh", ["你", "好\uff0c", "世", "界"]),
        ("你好 ok", "en", ["你好", "ok"]),
        ("", "en", []),
        (" ", "en", []),
        (" a - b", "en", ["a", "-", "b"]),
    ],
)
def test_words_with_their_marks(text: str, language: str | None, words: list[str]) -> None:
    ids = list(text.encode())
    times = [0.5 * i for i in range(len(ids) + 1)]
    found = timed_words(ByteTokenizer(), ids, times, language)
    assert [word.text for word in found] == words
    assert all(one.end <= other.start for one, other in itertools.pairwise(found))
    if words and not text.endswith(" "):
        assert (found[0].start, found[-1].end) == (0.0, times[-1])


def test_a_character_that_is_not_whole() -> None:
    assert timed_words(ByteTokenizer(), [32, 97, 0xE4], [0, 1, 2, 3], "en") == [Word("a\ufffd", 0, 3)]


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([(" He", 1), (" (", 1), ("no", 1), (")", 1), (".", 1)], [(" He", 1), (" (no).", 4)]),
        ([(" said", 1), (":", 1), (' "', 1), ("Go", 1), ('!"', 1)], [(" said:", 2), (' "Go!"', 3)]),
    ],
)
def test_marks_that_are_one_piece_with_their_space(pieces: Any, words: Any) -> None:
    assert _words(pieces, has_spaces=True) == words
