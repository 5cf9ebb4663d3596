"""How often each token of a request is in its output, kept up to date so that no step has to count.

Owned by the request. Ids are in the order in which they came, each once; numbers are 64-bit, so that a batch copies
them as they are.
"""

from array import array
from collections import Counter
from collections.abc import Iterable


class TokenCounts:
    """Different ids of prompt and output, and how often each is in the output: 0 for those of the prompt alone."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        """Start with no output."""
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = array("q", self._places)
        self._counts = array("q", bytes(self._ids.itemsize * len(self._ids)))

    def add(self, token_id: int) -> None:
        """Count one more id of the output. O(1)."""
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        self._counts[place] += 1

    def behind(self, draft_token_ids: tuple[int, ...]) -> tuple["array[int]", "array[int]"]:
        """Ids and counts as they are if these drafts are accepted; copies. O(different ids)."""
        ids, counts = self._ids[:], self._counts[:]
        for token_id, count in Counter(draft_token_ids).items():
            place = self._places.get(token_id)
            if place is None:
                ids.append(token_id)
                counts.append(count)
            else:
                counts[place] += count
        return ids, counts
