"""Text that is longer than a prompt may be, told without encoding all of it.

No bound on characters tells: a token of many spaces stands for a hundred, and normalizers drop text. So a long text is
counted in slices, and no further than to the first token too many; if it fits, it is encoded as a whole. A cut between
two slices makes a few tokens more at most, for which the count allows.
"""

from collections.abc import Callable
from dataclasses import dataclass

USUAL_CHARS_PER_TOKEN = 6
"""More than text usually has: what is shorter than that is encoded at once."""
SLICE_CHARS = 64 << 10
CUT_TOKENS = 16
"""More than a cut in a text changes of its tokens."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much of a text can be used.

    Attributes:
        num_tokens: The most tokens.
        keeps_end: Of a longer text only the end is wanted; else it is refused.
    """

    num_tokens: int
    keeps_end: bool = False


class TextTooLongError(Exception):
    """A text does not fit; `num_tokens` is the least that it has."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"a text of at least {num_tokens} tokens")
        self.num_tokens = num_tokens


def fitted(text: str, room: Room | None, count: Callable[[str], int]) -> str:
    """Return the text, or the end of it that fills the room; None is room for everything.

    Args:
        count: Tells how many tokens a text is.

    Raises:
        TextTooLongError: It does not fit, and its end alone is not wanted.
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
    """The end of a text: so many tokens, or more."""
    start = len(text)
    while start > 0 and num_tokens > 0:
        end, start = start, max(0, start - SLICE_CHARS)
        num_tokens -= max(0, count(text[start:end]) - CUT_TOKENS)
    return text[start:]
