"""Tokenizer and detokenizer as everything else sees them, and how much of a text they take.

`weft.server.text.tokenizer.Tokenizer` is the real one. A text that is too long for a prompt is recognized without
encoding all of it (`fitted`).
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from weft.server.text.chat_template import TemplateOptions


@dataclass(frozen=True, slots=True)
class TokenRoom:
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


class Detokenizer(Protocol):
    """Token ids of one output to text, a whole number of characters at a time. Mutated by its two methods alone."""

    def feed(self, token_id: int) -> str:
        """Take one id; return the text that is now certain, "" while a character is incomplete."""

    def finish(self) -> str:
        """Let go of what is still held."""


class TextTokenizer(Protocol):
    """A vocabulary with its chat template.

    `call_texts` is set once, when the format of calls is known, for a template that shows none: opening, before,
    middle, after, between, closing, as in a `Layout`. `is_of_encoder` is set once, where an encoder reads the texts and
    no template renders them.
    """

    call_texts: Sequence[str]
    is_of_encoder: bool

    @property
    def bos_token_id(self) -> int | None:
        """The beginning-of-text id; None when the vocabulary has none."""

    @property
    def vocab_size(self) -> int:
        """Ids that have a text are below this."""

    def encode(self, text: str, add_special_tokens: bool = True, room: TokenRoom | None = None) -> list[int]:
        """Plain text to ids; raises TextTooLongError when there is no room, as the others do that take one."""

    def encode_pair(self, first: str, second: str, room: TokenRoom | None = None) -> tuple[list[int], list[int]]:
        """Two texts to ids, with what the checkpoint puts around and between them."""

    def encode_continuation(self, text: str, room: TokenRoom | None = None) -> list[int]:
        """Text that follows other text to ids."""

    @property
    def template_variables(self) -> frozenset[str]:
        """What the chat template names besides what it defines."""

    def render_chat(self, messages: list[dict[str, Any]], options: TemplateOptions) -> list[str]:
        """Messages to text through the chat template, cut where `encode_rendered` must keep pieces apart."""

    def encode_rendered(self, pieces: list[str], room: TokenRoom | None = None) -> list[int]:
        """What was rendered to ids."""

    def encode_inserted(self, text: str, end: list[str], room: TokenRoom | None = None) -> list[int]:
        """A caller's text that goes on a rendered prompt to ids, and the rendered pieces behind it."""

    def template_source(self, has_tools: bool) -> str:
        """The chat template; empty when there is none."""

    def token_id(self, text: str) -> int | None:
        """The id of a token by its text; None when the vocabulary has none."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text, all at once."""

    def token_text(self, token_id: int) -> str:
        r"""One id as text; bytes that are no whole character read \xe4."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for."""

    def added_id(self, text: str) -> int | None:
        """The id of a control token, or of another added one, by its text."""

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this id out."""

    def detokenizer(self, skip_special_tokens: bool = True, kept: Set[int] = ...) -> Detokenizer:
        """Start the text of one output; `kept` ids are in it, whatever they are."""

    def bad_word_ids(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Every id sequence that writes the word."""


USUAL_CHARS_PER_TOKEN = 6
"""More than text usually has: a text that is shorter than that is encoded at once."""
SLICE_CHARS = 64 << 10
CUT_TOKENS = 16
"""More tokens than a cut in a text changes."""


def fitted(text: str, room: TokenRoom | None, count: Callable[[str], int]) -> str:
    """Return the text, or an end of it that fills the room; without a room everything fits.

    No number of characters is certain to be too many: one token may stand for a hundred spaces, and normalizers drop
    text. So the tokens of a long text are counted in slices, up to the first token too many. If the text fits, it is
    encoded as a whole. A cut between two slices adds a few tokens at most, which the count leaves out.

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
