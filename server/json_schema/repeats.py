r"""Repeats inside repeats of a regular expression: joins those that are one, and finds those that no automaton counts.

Where it cannot be seen which round of a group has begun, an automaton keeps every pair of the two counts: in
`([a-z]{1,200}-?){1,200}` 40,000 of them. `llguidance` takes such a pattern, and gives up in the middle of a text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

MAX_REPEATS = 2**16
MAX_COUNTS = 400
"""Most pairs of counts; `llguidance` fails from about 500 on."""
_SAMPLE = [*map(chr, range(128)), "é", "中"]
"""Stand for all characters where it is asked whether two parts can match the same one."""


@dataclass(slots=True)
class Part:
    """One piece of a sequence: its text, or for a group its opening and alternatives; and how often it repeats."""

    text: str
    repeat: str = ""
    alternatives: list[list["Part"]] = field(default_factory=list)

    @property
    def is_anchor(self) -> bool:
        """Whether it is a place, not a text."""
        return self.text in ("^", "$")

    @property
    def range(self) -> tuple[int, int | None]:
        """The least and the largest number of repeats; None: there is no largest."""
        sign = self.repeat[:1]
        if sign != "{":
            return 0 if sign in ("*", "?") else 1, None if sign in ("*", "+") else 1
        least, comma, most = self.repeat.rstrip("?}").removeprefix("{").partition(",")
        return int(least), int(most) if most else None if comma else int(least)


def joined_repeats(part: Part) -> Part:
    """The part, or what it repeats if that is one thing repeated: `([a-z]{1,9}){1,9}` is `[a-z]{1,81}`."""
    if part.text not in ("(", "(?:") or len(part.alternatives) != 1 or len(part.alternatives[0]) != 1:
        return part
    inner = part.alternatives[0][0]
    if inner.is_anchor or not (part.repeat and inner.repeat):
        return part
    (low, high), (least, most) = inner.range, part.range
    # Between k rounds and k + 1 no number is left out; this is so for all k if it is so for the first one.
    is_whole = least == most or high is None or (least + 1) * low <= least * high + 1
    is_endless = (high is None and most != 0) or (most is None and high != 0)
    longest = None if is_endless else (high or 0) * (most or 0)
    if not is_whole or low * least > MAX_REPEATS or (longest or 0) > MAX_REPEATS:
        return part
    return Part(inner.text, f"{{{low * least},{'' if longest is None else longest}}}", inner.alternatives)


_Level = tuple[list[Part], int]
"""What stands beside a part in a group, and how often the group repeats."""


def num_counts(alternatives: list[list[Part]], num_rounds: int = 1, around: Sequence[_Level] = ()) -> int:
    """The most pairs of counts that are kept at a time, where one repeat is in another. O(parts squared)."""
    most = 0
    for parts in alternatives:
        for i, part in enumerate(parts):
            (low, high), levels = part.range, [(parts[:i] + parts[i + 1 :], num_rounds), *around]
            count = max(low if high is None else high, 1)
            if low != high:
                most = max(most, _num_pairs(part, count, levels))
            most = max(most, num_counts(part.alternatives, count, levels))
    return most


def _num_pairs(part: Part, count: int, levels: Sequence[_Level]) -> int:
    """The counts of a part and of the groups around it of which rounds can end unseen, inside what the part matches."""
    chars, num_rounds = _chars(part), 1
    for others, rounds in levels:
        if not all(other.range[0] == 0 or other.is_anchor or _chars(other) & chars for other in others):
            break
        num_rounds *= rounds
    return count * num_rounds if num_rounds > 1 else 0


def _chars(part: Part) -> frozenset[str]:
    """The characters of the sample that occur in what a part matches."""
    if not part.alternatives:
        return _matched(part.text)
    return frozenset().union(*(_chars(inner) for parts in part.alternatives for inner in parts))


_SET_SIGNS = re.compile(r"\[\[|&&|--|~~|\|\|")


@lru_cache(maxsize=1024)
def _matched(text: str) -> frozenset[str]:
    if re.fullmatch(r"\\p(L|\{L.*\})", text):
        return frozenset(filter(str.isalpha, _SAMPLE))
    if _SET_SIGNS.search(text):  # of which Python warns that it will read them as sets one day
        return frozenset(_SAMPLE)
    try:
        return frozenset(filter(re.compile(text).fullmatch, _SAMPLE))
    except re.error:  # not as Python writes it
        return frozenset(_SAMPLE)
