"""Stop strings for outputs that are more than content: reasoning and calls may hold whatever they like.

A second parser tells what of the raw text is content, and only that is searched. Raw text goes on as long as none of
its content is held back; when a stop string is found, `num_content` says how much of the content stays.
"""

from weft.server.formats.parser import Kind, OutputParser, Piece
from weft.server.generate.choice_stream import StopMatcher


class ContentStops:
    """A `StopMatcher`."""

    def __init__(self, parser: OutputParser, stops: StopMatcher) -> None:
        self._parser = parser
        self._stops = stops
        self._held = ""  # raw text since content was held back
        self._num_searched = 0
        self._num_let_go = 0

    @property
    def matched(self) -> str | None:
        """See `StopMatcher`."""
        return self._stops.matched

    @property
    def num_content(self) -> int | None:
        """See `StopMatcher`."""
        return self._num_let_go if self.matched is not None else None

    def feed(self, text: str) -> str:
        """See `StopMatcher`."""
        for piece in self._parser.feed(text):
            self._search(piece)
        return self._let_go(text)

    def pass_over(self, text: str) -> str:
        """See `StopMatcher`."""
        num_chars = sum(len(piece.text) for piece in self._parser.feed(text) if piece.kind is Kind.CONTENT)
        self._num_searched += num_chars
        self._num_let_go += num_chars
        return text

    def finish(self) -> str:
        """See `StopMatcher`."""
        for piece in self._parser.finish():
            self._search(piece)
        rest, self._held = self._held, ""
        return rest

    def _search(self, piece: Piece) -> None:
        if piece.kind is Kind.CONTENT and self.matched is None:
            self._num_searched += len(piece.text)
            self._num_let_go += len(self._stops.feed(piece.text))

    def _let_go(self, text: str) -> str:
        text = self._held + text
        is_held = self.matched is None and self._num_searched > self._num_let_go
        self._held = text if is_held else ""
        return "" if is_held else text
