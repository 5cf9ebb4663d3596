"""Counts how often each token occurs in the output of a request, for penalties. O(1) for each output id.

Owned by the request. Ids are unique and in order of first occurrence. Arrays are 64-bit, so that a batch copies them as
they are.
"""

from array import array
from collections import Counter
from collections.abc import Iterable


class TokenCounts:
    """The distinct ids of prompt and output, with their counts in the output; 0 for ids only in the prompt."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        """Start with no output."""
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = array("q", self._places)
        self._counts = array("q", bytes(self._ids.itemsize * len(self._ids)))

    def add(self, token_id: int) -> None:
        """Count one more id of the output."""
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        self._counts[place] += 1

    def behind(self, draft_token_ids: tuple[int, ...]) -> tuple["array[int]", "array[int]"]:
        """Copies of ids and counts, as they will be if these drafts are accepted. O(distinct ids)."""
        ids, counts = self._ids[:], self._counts[:]
        for token_id, count in Counter(draft_token_ids).items():
            place = self._places.get(token_id)
            if place is None:
                ids.append(token_id)
                counts.append(count)
            else:
                counts[place] += count
        return ids, counts
