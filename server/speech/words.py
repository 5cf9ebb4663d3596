"""When each word is spoken: tokens become words as in OpenAI's `whisper/tokenizer.py` and `timing.py`."""

import string
from collections.abc import Sequence
from dataclasses import dataclass

from weft.server.text.text_tokenizer import TextTokenizer

_WITHOUT_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
"""Languages that do not put spaces between words: there each character, or what a token holds of them, is one."""
_BEFORE = "\"'“¡¿([{-"
_BEHIND = "\"'.。,\uff0c!\uff01?\uff1f:\uff1a”)]}、"


@dataclass(frozen=True, slots=True)
class Word:
    """A word with the marks around it. Times are in seconds."""

    text: str
    start: float
    end: float


def timed_words(
    tokenizer: TextTokenizer, token_ids: Sequence[int], times: Sequence[float], language: str | None
) -> list[Word]:
    """The words of some tokens.

    Args:
        times: When each token begins, and when the last one ends.
        language: Its code.
    """
    words, first = [], 0
    for text, size in _words(_pieces(tokenizer, token_ids), has_spaces=language not in _WITHOUT_SPACES):
        if text.strip():
            words.append(Word(text.strip(), times[first], times[first + size]))
        first += size
    return words


_Parts = list[tuple[str, int]]
"""Texts, and how many tokens each of them has."""


def _pieces(tokenizer: TextTokenizer, token_ids: Sequence[int]) -> _Parts:
    """The shortest texts of whole characters."""
    pieces: _Parts = []
    detokenizer, size = tokenizer.detokenizer(), 0
    for token_id in token_ids:
        size += 1
        if text := detokenizer.feed(token_id):
            pieces.append((text, size))
            size = 0
    return [*pieces, (detokenizer.finish(), size)] if size else pieces


def _words(pieces: _Parts, *, has_spaces: bool) -> _Parts:
    words: _Parts = []
    for text, size in pieces:
        is_mark = text.strip() in string.punctuation
        if words and has_spaces and not text.startswith(" ") and not is_mark:
            words[-1] = words[-1][0] + text, words[-1][1] + size
        else:
            words.append((text, size))
    return _with_marks(words)


def _with_marks(words: _Parts) -> _Parts:
    """Marks that belong to the word behind them or before them, with it."""
    begun: _Parts = []
    for text, size in reversed(words):
        if begun and text.startswith(" ") and text.strip() in _BEFORE:
            begun[-1] = text + begun[-1][0], size + begun[-1][1]
        else:
            begun.append((text, size))
    ended: _Parts = []
    for text, size in reversed(begun):
        if ended and text[:1] in _BEHIND and not ended[-1][0].endswith(" "):  # also in "12.5"
            ended[-1] = ended[-1][0] + text, ended[-1][1] + size
        else:
            ended.append((text, size))
    return ended
