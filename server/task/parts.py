"""Reads the parts of a message's content: as text, or as a span of tokens that stands for something else.

`PARTS` has a reader for each type that is known. A span is made of control tokens, which no text of a caller becomes.
So the content has a mark in its place, which nobody could have written, and the template shows it as any text. Then
the span's tokens take its place in the rendered prompt (`Spans.placed`).
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.engine.wire.inputs import TokenSpan
from weft.server.text.replayed import TEXT_PARTS


@dataclass(frozen=True, slots=True)
class Span:
    """What a prompt holds in place of a part that is no text.

    Attributes:
        placeholder: The text of a control token; the span is num_tokens of these.
        data: What they stand for.
    """

    placeholder: str
    num_tokens: int
    data: bytes


class Part(Protocol):
    """A part of a content, in any API's form."""

    @property
    def type(self) -> str:
        """Says how to read it."""


Reader = Callable[[Any, str], str | Span]
"""Reads a part; the text is its path in the body."""
PARTS: dict[str, Reader] = {
    **dict.fromkeys(TEXT_PARTS, lambda part, at: part.text or ""),
    "refusal": lambda part, at: part.refusal or "",
}


class Spans:
    """The spans of one conversation, and the marks that stand for them in its messages."""

    def __init__(self) -> None:
        """Start with none."""
        self._tag = secrets.token_hex(8)
        self._spans: list[Span] = []

    def mark(self, span: Span) -> str:
        """Add a span; the text that stands for it until the prompt is rendered."""
        self._spans.append(span)
        return f"{self._tag}{len(self._spans) - 1:08x}"

    def placed(self, pieces: list[str]) -> tuple[list[str], list[Span]]:
        """A rendered prompt with placeholders for the marks, as pieces of their own, and their spans in its order."""
        if not self._spans:
            return pieces, []
        shown, found = [], []
        for piece in pieces:
            for i, text in enumerate(re.split(f"{self._tag}([0-9a-f]{{8}})", piece)):
                if i % 2:
                    found.append(span := self._spans[int(text, 16)])
                    shown.append(span.placeholder * span.num_tokens)
                elif text:
                    shown.append(text)
        return shown, found


def part_text(part: Part, at: str, spans: Spans | None = None) -> str | None:
    """What stands for a part in the content; None: nobody can read it.

    Args:
        at: The part's path in the body.
        spans: Those of the conversation; None: only text can stand here.
    """
    shown = PARTS[part.type](part, at) if part.type in PARTS else None
    if isinstance(shown, Span):
        return None if spans is None else spans.mark(shown)
    return shown


def located(token_ids: Sequence[int], spans: Sequence[Span], ids: Mapping[str, int | None]) -> list[TokenSpan]:
    """Where spans are in an encoded prompt, of which the beginning may have been cut.

    Args:
        spans: In the prompt's order. Nothing else in it is one of their placeholders.
        ids: The token of each placeholder.
    """
    meant = {ids[span.placeholder] for span in spans}
    ends = [i + 1 for i, token_id in enumerate(token_ids) if token_id in meant] if spans else []
    found = []
    for span in reversed(spans):
        if ends:
            digest = hashlib.blake2b(span.data, digest_size=16).digest()
            found.append(TokenSpan(ends[-1] - span.num_tokens, span.num_tokens, digest))
        del ends[-span.num_tokens :]
    return found[::-1]
