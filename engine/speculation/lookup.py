"""Finds in a text what an output will probably go on with.

A lookup keeps a pointer into its text and moves it along while the output says the same. When the output says
something else, the longest recent n-gram of the output that occurs in the text (n of 2 or more) tells where to go on:
behind the place where the pointer was lost if it occurs there, else anywhere, the nearest of equals. The pairs of a
text are indexed when the first one is looked for, once, and as the text grows; a step costs no more for a long text.
"""

from bisect import bisect_left
from collections.abc import Sequence

from weft.engine.speculation.pace import Pace

_MAX_CANDIDATES = 16
"""Occurrences of a pair that are compared; in a monotonous text there are thousands."""

_MAX_MATCH = 16
"""Ids before the pair that are compared; a longer match says no more."""


class Text:
    """Token ids in which pairs are found. It may grow at its end, and may serve many lookups."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self._ends: dict[tuple[int, int], list[int]] = {}
        self._num_indexed = 1

    def ends(self, first: int, second: int) -> list[int]:
        """Positions right behind each occurrence of a pair, ascending; not the end of the text."""
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

    def __init__(self, text: Text, num_tokens: int, pointer: int | None) -> None:
        """Start level with the first num_tokens ids of the request.

        Args:
            text: Where to look; the ids of the request themselves for prompt lookup.
            pointer: Where in the text the output should begin; None if it is to be found.
        """
        self.pace = Pace()
        self._text = text
        self._num_followed = num_tokens
        self._pointer = pointer
        self._lost_at = num_tokens if pointer is None else pointer

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Up to `most` ids that may follow token_ids, the request's; empty when nothing like its end is in the text."""
        self._follow(token_ids)
        if self._pointer is None:
            self._pointer = self._find(token_ids)
        text = self._text.token_ids
        if self._pointer is None or self._pointer >= len(text):
            return []
        draft = list(text[self._pointer : self._pointer + most])
        if text is token_ids:  # the text goes on with the draft itself, so a short loop gives a long draft
            period = len(text) - self._pointer
            while len(draft) < most:
                draft.append(draft[-period])
        return draft

    def _follow(self, token_ids: Sequence[int]) -> None:
        """Move the pointer along the ids that are new; None once they differ."""
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
        """How many ids before `end` in the text are those at the end of the output, as far as is compared."""
        most = min(end, len(token_ids), _MAX_MATCH)
        text = self._text.token_ids
        return next((n for n in range(2, most) if text[end - 1 - n] != token_ids[-1 - n]), most)
