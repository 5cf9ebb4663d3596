"""Splits the text of one choice into reasoning, content and calls, each with its tokens.

If tokens are tracked, the parser gets the text token by token. So the kind of a token does not depend on how the
engine's outputs were merged. Stop strings are searched in content only, not in reasoning or calls. While some content
may become a stop string, everything after it is held back too.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weft.engine.shared.messages import FinishReason
from weft.server.formats.parser import Kind, OutputParser, Piece, joined
from weft.server.generate.events import (
    CallArguments,
    CallClosed,
    CallOpened,
    End,
    Event,
    Reasoning,
    Text,
    Token,
    TokenIds,
)
from weft.server.task.task import TextOptions
from weft.server.text.stop_strings import StopStrings


class _Read(NamedTuple):
    """The parser's result for a token's text; `token` is None for text of earlier tokens.

    Attributes:
        regions: The regions before and after the text.
    """

    token: Token | None
    regions: set[Kind]
    pieces: list[Piece]


class ParsedChoice:
    """The parser of one choice. Only `feed` mutates it.

    Attributes:
        num_tokens: Tracked tokens so far, up to the match of a stop string.
        num_reasoning_tokens: Tracked tokens of reasoning, including the markers and newlines around it.
        has_matched: A stop string matched, so the choice has ended.
    """

    def __init__(self, parser: OutputParser, options: TextOptions, *, is_whole: bool = False) -> None:
        """Start with nothing read. If there are stop strings, tokens must be tracked.

        Args:
            is_whole: The answer is not streamed. All text may then be parsed once, at the end, which is faster.
        """
        self._parser = parser
        self._options = options
        self._stops = StopStrings(options.stops, options.include_stop) if options.stops else None
        self._waits_for_end = is_whole and self._stops is None
        self._waiting: tuple[list[str], list[Token]] = [], []
        self._num_fed = 0
        self._unsure: list[_Read] = []  # held back: their content may become a stop string
        self._num_held = self._num_let_go = 0  # characters of that content: may be a stop string; cannot be
        self._is_cut = False  # a stop string cut the content
        self._undecided: list[Token] = []  # tokens whose text the parser still holds
        self._call: tuple[str, list[str]] | None = None  # the open call; None: no call is open
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.has_matched = False

    def feed(self, text: str, tokens: list[Token], end: End | None) -> list[Event]:
        """Take the choice's new text; return the events that are certain now. Adjacent ones of a kind are joined."""
        if self._waits_for_end:
            texts, all_tokens = self._waiting
            texts.append(text)
            all_tokens += tokens
            if end is None:
                return []
            text, tokens = "".join(texts), all_tokens
        num_sure = 0
        for token, slice_ in self._slices(text, tokens):
            before = self._parser.region
            pieces = self._parser.feed(slice_) if slice_ else []
            self._unsure.append(_Read(token, {before, self._parser.region}, pieces))
            self.num_tokens += token is not None
            if self._stops is not None:
                self._search(self._stops, pieces, is_passed=self.num_tokens <= self._options.min_tokens)
                if self.has_matched:
                    break
            if not self._num_held:
                num_sure = len(self._unsure)
        if end is None and not self.has_matched:
            return self._tell(num_sure)
        end = self._finish(end)
        return [*self._tell(len(self._unsure)), *self._close_call(), end]

    def _search(self, stops: StopStrings, pieces: Sequence[Piece], *, is_passed: bool) -> None:
        """Search content for stop strings. If `is_passed`, skip the search."""
        for piece in pieces:
            if piece.kind is Kind.CONTENT and stops.matched is None:
                let_go = piece.text if is_passed else stops.feed(piece.text)
                self._num_let_go += len(let_go)
                self._num_held += len(piece.text) - len(let_go)
        self.has_matched = stops.matched is not None

    def _finish(self, end: End | None) -> End:
        """Flush the parser, and return how the choice ended. `end` is None if a stop string has matched."""
        is_cut_call = self._parser.region is Kind.CALL and end is not None and end.reason is FinishReason.LENGTH
        rest = self._parser.finish()
        if self._stops is not None:
            self._search(self._stops, rest, is_passed=False)
            if self.has_matched:
                end = End(FinishReason.STOP, self._stops.matched)
            else:
                self._num_let_go += self._num_held
        if is_cut_call and not self.has_matched:  # markup of a cut call is not content
            rest = [piece for piece in rest if piece.kind is not Kind.CONTENT]
        self._unsure.append(_Read(None, {self._parser.region}, rest))
        assert end is not None
        return end

    def _tell(self, num_reads: int) -> list[Event]:
        """The events of the first `num_reads` reads, which are now certain."""
        reads, self._unsure = self._unsure[:num_reads], self._unsure[num_reads:]
        pieces: list[Piece] = []
        tokens: list[Token] = []
        for token, regions, new in reads:
            kept = new if self._stops is None else self._kept(new)
            pieces += kept
            if token is not None:
                self._undecided.append(token)
            if self._undecided:
                tokens += self._decide(regions, kept)
        events: list[Event] = []
        if self._options.tells_ids and (ids := [read.token.token_id for read in reads if read.token is not None]):
            events.append(TokenIds(ids))
        for kind, text in joined(pieces):
            if self._call is not None and kind is not Kind.ARGUMENTS:
                events += self._close_call()
            match kind:
                case Kind.CONTENT:
                    events.append(Text(text, tokens))
                    tokens = []
                case Kind.REASONING:
                    events.append(Reasoning(text))
                case Kind.CALL:
                    self._call = text, []
                    events.append(CallOpened(text))
                case Kind.ARGUMENTS:
                    assert self._call is not None, "arguments are those of a call"
                    self._call[1].append(text)
                    events.append(CallArguments(text))
        return events

    def _close_call(self) -> list[CallClosed]:
        """The end of the open call, if there is one."""
        if self._call is None:
            return []
        (name, arguments), self._call = self._call, None
        return [CallClosed(name, "".join(arguments))]

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        """Drop everything after the content that the stop strings released."""
        kept: list[Piece] = []
        for piece in pieces:
            if piece.kind is Kind.CONTENT:
                text = piece.text[: self._num_let_go]
                self._num_let_go -= len(text)
                self._is_cut = self._is_cut or len(text) < len(piece.text)
                kept += [Piece(Kind.CONTENT, text)] if text else []
            elif not self._is_cut:
                kept.append(piece)
        return kept

    def _decide(self, regions: set[Kind], pieces: Sequence[Piece]) -> list[Token]:
        """Count the undecided tokens as reasoning or content once that is certain; return those of content."""
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
        """Cut the text where tokens begin. Text before the first token belongs to earlier tokens."""
        starts = [max(0, token.start - self._num_fed) for token in tokens]
        self._num_fed += len(text)
        ends = [*starts, len(text)]
        if ends[0]:
            yield None, text[: ends[0]]
        for token, start, end in zip(tokens, starts, ends[1:], strict=True):
            yield token, text[start:end]
