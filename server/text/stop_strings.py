"""Finds stop strings in text that arrives in pieces, and holds back text that may become one.

It holds the longest suffix of the text so far that is a proper prefix of some stop string, never more. Invariant: the
released text and the match do not depend on how the text was cut into pieces. The match that ends first wins, as it
would character by character. Of matches that end together the longest wins, which begins first.
"""

from collections.abc import Sequence


class StopStrings:
    """One text that is being searched. Only its methods mutate it."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """Start a new text.

        Args:
            include: Whether the released text keeps the stop string that ended it.

        Raises:
            ValueError: A stop string is empty.
        """
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take the next piece; return what cannot be part of a stop string. After a match, return nothing more."""
        if self.matched is not None:
            return ""
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            end, self.matched = match
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        start = len(text) - self._num_held(text)
        self._held = text[start:]
        return text[:start]

    def finish(self) -> str:
        """The text has ended: return what is still held."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Return the end and the stop string of the match that ends first."""
        best: tuple[int, str] | None = None
        for stop in self._stops:  # longest first, so that a tie keeps the longest
            start = text.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = start + len(stop), stop
        return best

    def _num_held(self, text: str) -> int:
        """Return the length of the longest suffix that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            tail = text[max(0, len(text) - len(stop) + 1) :]
            start = tail.find(stop[0])
            while start >= 0 and not stop.startswith(tail[start:]):
                start = tail.find(stop[0], start + 1)
            if start >= 0:
                longest = max(longest, len(tail) - start)
        return longest
