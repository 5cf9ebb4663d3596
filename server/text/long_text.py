"""Recognizes text that is too long for a prompt without encoding all of it.

No number of characters is certain to be too many: one token may stand for a hundred spaces, and normalizers drop text.
So the tokens of a long text are counted in slices, up to the first token too many. If the text fits, it is encoded as a
whole. A cut between two slices adds a few tokens at most, which the count leaves out.
"""

from collections.abc import Callable
from dataclasses import dataclass

USUAL_CHARS_PER_TOKEN = 6
"""More than text usually has: a text that is shorter than that is encoded at once."""
SLICE_CHARS = 64 << 10
CUT_TOKENS = 16
"""More tokens than a cut in a text changes."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much of a text can be used.

    Attributes:
        num_tokens: Most tokens.
        keeps_end: A longer text is cut to its end; else it is refused.
    """

    num_tokens: int
    keeps_end: bool = False


class TextTooLongError(Exception):
    """A text does not fit; it has at least `num_tokens` tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"a text of at least {num_tokens} tokens")
        self.num_tokens = num_tokens


def fitted(text: str, room: Room | None, count: Callable[[str], int]) -> str:
    """Return the text, or an end of it that fills the room; without a room everything fits.

    Args:
        count: Counts the tokens of a text.

    Raises:
        TextTooLongError: The text does not fit, and its end alone is not wanted.
    """
    if room is None or len(text) <= USUAL_CHARS_PER_TOKEN * room.num_tokens:
        return text
    if room.keeps_end:
        return _end(text, room.num_tokens + CUT_TOKENS, count)
    num_tokens = 0
    for start in range(0, len(text), SLICE_CHARS):
        num_tokens += max(0, count(text[start : start + SLICE_CHARS]) - CUT_TOKENS)
        if num_tokens > room.num_tokens:
            raise TextTooLongError(num_tokens)
    return text


def _end(text: str, num_tokens: int, count: Callable[[str], int]) -> str:
    """An end of the text that has at least `num_tokens` tokens, if the text has so many."""
    start = len(text)
    while start > 0 and num_tokens > 0:
        end, start = start, max(0, start - SLICE_CHARS)
        num_tokens -= max(0, count(text[start:end]) - CUT_TOKENS)
    return text[start:]
