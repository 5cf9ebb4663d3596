"""One choice's text as what it means: reasoning, content and calls, each with the tokens that it is made of.

Text is handed to the parser token by token where tokens are tracked, so that what a token counts as does not depend on
how the engine's outputs were merged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weft.engine.shared.messages import FinishReason
from weft.server.formats.parser import Kind, OutputParser, Piece, joined
from weft.server.generate.choice_stream import Delta, Token


@dataclass(slots=True)
class Call:
    """A call so far."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """All pieces of a choice, joined."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        match piece.kind:
            case Kind.REASONING:
                self.reasoning += piece.text
            case Kind.CONTENT:
                self.content += piece.text
            case Kind.CALL:
                self.calls.append(Call(piece.text))
            case Kind.ARGUMENTS:
                self.calls[-1].arguments += piece.text


class ParsedChoice:
    """The parser of one choice. Mutated by `feed` alone.

    Attributes:
        num_reasoning_tokens: Tracked tokens that were spent on reasoning, markers and newlines around it included.
        num_calls: Calls that have begun.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._num_fed = 0
        self._num_content = 0
        self._is_cut = False  # by a stop string
        self._undecided: list[Token] = []  # whose text the parser still holds
        self.num_reasoning_tokens = 0
        self.num_calls = 0

    def feed(self, delta: Delta) -> tuple[list[Piece], list[Token]]:
        """Take what the choice gained.

        Returns:
            What is certain now, without neighbours of the same kind, and the tokens that are content.
        """
        pieces: list[Piece] = []
        content_tokens: list[Token] = []
        for token, text in self._slices(delta.text, delta.tokens):
            before = self._parser.region
            new = self._kept(self._parser.feed(text) if text else [], delta.num_content)
            pieces += new
            if token is not None:
                self._undecided.append(token)
                content_tokens += self._decide({before, self._parser.region}, new)
        if delta.finish_reason is not None:
            is_cut_call = delta.finish_reason is FinishReason.LENGTH and self._parser.region is Kind.CALL
            rest = self._kept(self._parser.finish(), delta.num_content)
            if is_cut_call:  # its markup is nobody's content
                rest = [piece for piece in rest if piece.kind is not Kind.CONTENT]
            pieces += rest
            content_tokens += self._decide({self._parser.region}, rest)
        self.num_calls += sum(piece.kind is Kind.CALL for piece in pieces)
        return joined(pieces), content_tokens

    def _kept(self, pieces: Sequence[Piece], num_content: int | None) -> list[Piece]:
        """Leave out what lies behind so many characters of content."""
        kept: list[Piece] = []
        for piece in pieces:
            if piece.kind is Kind.CONTENT:
                end = None if num_content is None else num_content - self._num_content
                self._is_cut = self._is_cut or (end is not None and len(piece.text) > end)
                piece = Piece(Kind.CONTENT, piece.text[:end])
                self._num_content += len(piece.text)
                kept += [piece] if piece.text else []
            elif not self._is_cut:
                kept.append(piece)
        return kept

    def _decide(self, regions: set[Kind], pieces: Sequence[Piece]) -> list[Token]:
        """Tell what the tokens so far were spent on, as far as that is certain; return those of content."""
        is_content = any(piece.kind is Kind.CONTENT for piece in pieces)
        if regions == {Kind.CONTENT} and not is_content:
            return []
        decided, self._undecided = self._undecided, []
        if is_content:
            return decided
        if Kind.REASONING in regions:
            self.num_reasoning_tokens += len(decided)
        return []

    def _slices(self, text: str, tokens: Sequence[Token]) -> Iterator[tuple[Token | None, str]]:
        """Cut the text where tokens begin; what comes before the first one belongs to earlier tokens."""
        starts = [max(0, token.start - self._num_fed) for token in tokens]
        self._num_fed += len(text)
        ends = [*starts, len(text)]
        if ends[0]:
            yield None, text[: ends[0]]
        for token, start, end in zip(tokens, starts, ends[1:], strict=True):
            yield token, text[start:end]
