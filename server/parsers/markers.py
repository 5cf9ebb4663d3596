"""Markers in text that comes in pieces: which is next, and what may still become one."""

import re
from collections.abc import Sequence


def any_of(markers: Sequence[str]) -> re.Pattern[str]:
    """A pattern that finds the first of these texts, at least one; of those that begin together the longest."""
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


def num_held(text: str, markers: Sequence[str], start: int = 0) -> int:
    """Length of the longest end of `text[start:]` that is the beginning of a marker, and not all of it."""
    longest = max((len(marker) for marker in markers), default=0)
    for at in range(max(start, len(text) - longest + 1), len(text)):
        tail = text[at:]
        if any(len(tail) < len(marker) and marker.startswith(tail) for marker in markers):
            return len(tail)
    return 0
