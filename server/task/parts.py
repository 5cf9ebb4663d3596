"""Reads the parts of a message's content: as text, or as a span of tokens that stands for something else.

`PARTS` has a reader for each type that is known. A span is made of control tokens, which no text of a caller becomes.
So the content has a mark in its place, which nobody could have written, and the template shows it as any text. Then
the span's tokens take its place in the rendered prompt (`Spans.placed`). A picture has a mark before it is read; the
template is shown a part that is an image in the place of the mark, if it takes such parts (`Spans.rendered`).
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec.structs import replace

from weft.engine.wire.inputs import TokenSpan
from weft.engine.wire.pictures import Picture
from weft.server.errors import ApiError
from weft.server.pictures.source import PictureSource, source_of
from weft.server.text.chat_template import ChatTemplateError
from weft.server.text.replayed import TEXT_PARTS


@dataclass(frozen=True, slots=True)
class Span:
    """What a prompt holds in place of a part that is no text.

    Attributes:
        placeholder: The text of a control token; the span is num_tokens of these, and what `text` has between them.
        data: What they stand for.
        text: The whole of it; empty: the placeholders alone.
        sign: What a chat template writes for such a part; empty: nothing is known of that.
        picture: What the model sees there; None: no picture.
    """

    placeholder: str
    num_tokens: int
    data: bytes
    text: str = ""
    sign: str = ""
    picture: Picture | None = None


class Part(Protocol):
    """A part of a content, in any API's form."""

    @property
    def type(self) -> str:
        """Says how to read it."""


Reader = Callable[[Any, str], str | Span | PictureSource]
"""Reads a part; the text is its path in the body."""
PARTS: dict[str, Reader] = {
    **dict.fromkeys(TEXT_PARTS, lambda part, at: part.text or ""),
    "refusal": lambda part, at: part.refusal or "",
    **dict.fromkeys(("image_url", "input_image", "image"), source_of),
}


Beyond = Literal["refuse", "read", "leave"]
"""To refuse pictures that the context has no room for; to read them since tokens are only counted; or to leave the
oldest unread, since the turns that show them will be left out."""


class Spans:
    """The spans of one conversation, and the marks that stand for them in its messages.

    Attributes:
        noun: What the API calls its parts.
        beyond: What to do with pictures that a bound leaves no room for.
        left: Why some pictures are not read, which is raised where one of them is to be shown; None: all are.
    """

    def __init__(self, noun: str = "parts", beyond: Beyond = "refuse") -> None:
        """Start with none."""
        self.noun, self.beyond = noun, beyond
        self._tag = secrets.token_hex(8)
        self._spans: list[Span | PictureSource] = []
        self.left: ApiError | None = None

    def mark(self, span: Span | PictureSource) -> str:
        """Add a span, or a picture that is to be read; the text that stands for it until the prompt is rendered."""
        self._spans.append(span)
        return f"{self._tag}{len(self._spans) - 1:08x}"

    @property
    def unread(self) -> list[tuple[int, PictureSource]]:
        """The pictures that are still to be read, each with its number."""
        return [(i, span) for i, span in enumerate(self._spans) if isinstance(span, PictureSource)]

    @property
    def num_chars(self) -> int:
        """Of what was read, as a prompt shows it."""
        return sum(
            len(span.text or span.placeholder * span.num_tokens) for span in self._spans if isinstance(span, Span)
        )

    def put(self, number: int, span: Span) -> None:
        """What became of a picture."""
        self._spans[number] = span

    def leave(self, error: ApiError) -> None:
        """Leave the pictures that are not read, unless that is refused with the error."""
        if self.beyond != "leave":
            raise error
        self.left = error

    def rendered(
        self, messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], list[str]]
    ) -> list[str]:
        """Render messages, with marks where spans are.

        A template that takes images as parts may put them in another place of their turn. It writes a sign for each. If
        it refuses such parts, or does not show as many, marks stand in the text, as for any other span.
        """
        sign = next((span.sign for span in self._spans if isinstance(span, Span) and span.sign), "")
        if not sign:
            return render(messages)
        order = [int(text, 16) for each in messages for text in re.findall(self._mark, str(each.get("content") or ""))]
        try:
            pieces = [piece.split(sign) for piece in render([self._in_parts(message) for message in messages])]
        except ChatTemplateError:
            return render(messages)
        if sum(len(piece) - 1 for piece in pieces) != len(order):
            return render(messages)
        numbers = iter(order)
        return [first + "".join(f"{self._tag}{next(numbers):08x}{text}" for text in rest) for first, *rest in pieces]

    @property
    def _mark(self) -> str:
        return f"{self._tag}([0-9a-f]{{8}})"

    def _in_parts(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with parts in the place of marks, which a line end joined to the text."""
        content = message.get("content")
        if not isinstance(content, str) or self._tag not in content:
            return message
        parts = list[dict[str, str]]()
        for i, text in enumerate(re.split(f"\n?{self._mark}\n?", content)):
            parts += [{"type": "image"}] if i % 2 else [{"type": "text", "text": text}] if text else []
        return {**message, "content": parts}

    def placed(self, pieces: list[str]) -> tuple[list[str], list[Span]]:
        """A rendered prompt with placeholders for the marks, as pieces of their own, and their spans in its order.

        Raises:
            ApiError: One of them was left.
        """
        if not self._spans:
            return pieces, []
        shown, found = [], []
        for piece in pieces:
            for i, text in enumerate(re.split(self._mark, piece)):
                if i % 2:
                    span = self._spans[int(text, 16)]
                    if isinstance(span, PictureSource):
                        assert self.left is not None, "pictures are read before a prompt is made"
                        raise self.left
                    found.append(span)
                    shown.append(span.text or span.placeholder * span.num_tokens)
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
    if shown is None or isinstance(shown, str):
        return shown
    return None if spans is None else spans.mark(shown)


def located(
    token_ids: Sequence[int], spans: Sequence[Span], ids: Mapping[str, int | None]
) -> tuple[list[TokenSpan], list[Picture]]:
    """Where spans are in an encoded prompt, of which the beginning may have been cut, and the pictures in them.

    Args:
        spans: In the prompt's order. Nothing else in it is one of their placeholders.
        ids: The token of each placeholder.
    """
    meant = {ids[span.placeholder] for span in spans}
    places = [i for i, token_id in enumerate(token_ids) if token_id in meant] if spans else []
    found, pictures = list[TokenSpan](), list[Picture]()
    for span in reversed(spans):
        if places:
            is_cut = span.num_tokens > len(places)
            start = min(places[-1] + 1 - span.num_tokens, -1) if is_cut else places[-span.num_tokens]
            digest = hashlib.blake2b(span.data, digest_size=16).digest()
            found.append(TokenSpan(start, places[-1] + 1 - start, digest))
            pictures += [span.picture] if span.picture else []
        del places[-span.num_tokens :]
    return found[::-1], pictures[::-1]


def without_first(
    num_cut: int, spans: Sequence[TokenSpan], pictures: Sequence[Picture]
) -> tuple[list[TokenSpan], list[Picture]]:
    """Spans and their pictures in a prompt whose first num_cut tokens are cut away; a span may be cut in two."""
    found = [replace(span, start=span.start - num_cut) for span in spans]
    left = [i for i, span in enumerate(found) if span.start + span.num_tokens > 0]
    return [found[i] for i in left], [pictures[i] for i in left] if pictures else []
