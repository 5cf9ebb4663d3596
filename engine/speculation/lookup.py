"""Finds in a text how an output will probably continue.

A lookup keeps a pointer into its text and advances it while the output equals the text. When they differ, the lookup
searches the text for the longest n-gram (n >= 2) that the output ends with, and continues behind it. Places behind the
lost pointer go first; of equal matches the nearest wins. The pairs of a text are indexed at the first search and as
the text grows, so a step costs no more for a long text.
"""

from bisect import bisect_left
from collections.abc import Sequence

from weft.engine.speculation.pace import Pace

_MAX_CANDIDATES = 16
"""Occurrences of a pair that are compared; a repetitive text has thousands."""

_MAX_MATCH = 16
"""Most ids of a match that are compared; a longer match says no more."""


class TokenHistory:
    """Token ids with an index of their pairs. May grow at its end, and may serve many lookups."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self._ends: dict[tuple[int, int], list[int]] = {}
        self._num_indexed = 1

    def ends(self, first: int, second: int) -> list[int]:
        """Positions right behind each occurrence of a pair, ascending, without the end of the text."""
        end = len(self.token_ids) - 1
        if self._num_indexed < end:
            start = self._num_indexed - 1
            pairs = zip(self.token_ids[start : end - 1], self.token_ids[start + 1 : end], strict=True)
            for position, pair in enumerate(pairs, start + 2):
                self._ends.setdefault(pair, []).append(position)
            self._num_indexed = end
        return self._ends.get((first, second), [])


class Lookup:
    """Follows one output through a text."""

    def __init__(self, text: TokenHistory, num_tokens: int, pointer: int | None) -> None:
        """Start behind the first num_tokens ids of the request.

        Args:
            text: Where to search; for prompt lookup the ids of the request itself.
            pointer: Where in the text the output should begin; None if that must be searched.
        """
        self.pace = Pace()
        self._text = text
        self._num_followed = num_tokens
        self._pointer = pointer
        self._lost_at = num_tokens if pointer is None else pointer

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Up to `most` ids that may follow token_ids, those of the request; empty if the text has no match."""
        self._follow(token_ids)
        if self._pointer is None:
            self._pointer = self._find(token_ids)
        text = self._text.token_ids
        if self._pointer is None or self._pointer >= len(text):
            return []
        draft = list(text[self._pointer : self._pointer + most])
        if text is token_ids:  # the text continues with the draft itself, so a short loop gives a long draft
            period = len(text) - self._pointer
            while len(draft) < most:
                draft.append(draft[-period])
        return draft

    def _follow(self, token_ids: Sequence[int]) -> None:
        """Advance the pointer over the new ids; it becomes None where they differ."""
        text = self._text.token_ids
        for position in range(self._num_followed, len(token_ids)):
            if self._pointer is None:
                break
            if self._pointer < len(text) and text[self._pointer] == token_ids[position]:
                self._pointer += 1
            else:
                self._lost_at = self._pointer
                self._pointer = None
        self._num_followed = len(token_ids)

    def _find(self, token_ids: Sequence[int]) -> int | None:
        if len(token_ids) < 2:
            return None
        ends = self._text.ends(token_ids[-2], token_ids[-1])
        middle = bisect_left(ends, self._lost_at)
        nearest = ends[middle : middle + _MAX_CANDIDATES] or ends[max(0, middle - _MAX_CANDIDATES) : middle][::-1]
        return max(nearest, key=lambda end: self._num_equal(end, token_ids), default=None)

    def _num_equal(self, end: int, token_ids: Sequence[int]) -> int:
        """How many ids before `end` in the text equal the last ids of the output; at most _MAX_MATCH."""
        most = min(end, len(token_ids), _MAX_MATCH)
        text = self._text.token_ids
        return next((n for n in range(2, most) if text[end - 1 - n] != token_ids[-1 - n]), most)
