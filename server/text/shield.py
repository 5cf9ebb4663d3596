"""Keeps text from others from acting as control: as control tokens in a prompt, or control characters in a terminal.

A chat template puts the caller's strings between control tokens such as <|im_end|>. Inside a message, the same text
would be encoded as the token itself: the message could end its own turn and forge another one. The template must see
the strings as they are, so nothing is removed or replaced. Instead:

1. `Shield.mark` puts one character, which occurs in no string, at each place in a caller's string where a special token
   is, or could arise together with the text that the template or another string puts beside it.
2. The template renders the marked strings.
3. `Marked.cut` cuts the rendered text at the marks. No special token reaches over a cut, so the special tokens in the
   separate pieces are the template's own. If the whole text holds the same ones, no cut was needed.

Invariant: a string that neither holds a special token's text nor begins or ends with part of one reaches the template
unchanged. Limits: a special token of one character cannot be cut. A special token is not prevented if the template
makes it by cutting a string in its middle and joining the parts, or by leaving nothing between two texts of its own.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Generic, TypeVar

from weft.engine.wire.errors import CONTROLS

_MARKS = tuple(chr(code) for code in range(0xE000, 0xF900))  # the Basic Multilingual Plane's private-use characters
_ALL_MARKS = frozenset(_MARKS)
_ESCAPED = re.compile(r"\\u[ef][0-9a-f]{3}")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
WINDOW_CHARS = 1 << 18

_NO_NAMES: AbstractSet[str] = frozenset()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Marked(Generic[T]):
    """A caller's data with marks in its strings; without a mark it is unchanged."""

    value: T
    mark: str | None

    def cut(self, rendered: str) -> list[str]:
        """Split the text that a template rendered from the value; one piece if there is no mark. No piece is empty."""
        if self.mark is None:
            return [rendered]
        return [piece for piece in rendered.replace(_escaped(self.mark), self.mark).split(self.mark) if piece]


class Shield:
    """Knows the texts of one vocabulary's special tokens. Immutable."""

    def __init__(self, special_texts: Collection[str]) -> None:
        texts = sorted(text for text in special_texts if len(text) > 1)
        self._max_length = max(map(len, texts), default=0)
        self._listed = "\0" + "\0".join(texts) + "\0"
        self._first_chars = frozenset(text[0] for text in texts)
        self._last_chars = frozenset(text[-1] for text in texts)
        self._whole = _overlapping(texts)

    def mark(self, value: T, names: AbstractSet[str] = _NO_NAMES) -> Marked[T]:
        """Mark every string in JSON data, keys included.

        Args:
            value: Messages, tools, or anything else that callers supply and a template renders.
            names: Words by which the template looks up keys or compares values. Such a word is not marked where it is
                only part of a special token's text: with `<|user|>` special, "user" must stay "user".

        Raises:
            ValueError: The data holds all private-use characters.
        """
        strings: list[str] = []

        def collect(text: str) -> str:
            strings.append(text)
            return text

        _mapped(value, collect)
        if not any(True for string in strings for _ in self._offsets(string, names)):
            return Marked(value, None)
        used = _used(strings)
        mark = next((mark for mark in _MARKS if mark not in used and _escaped(mark) not in used), None)
        if mark is None:
            raise ValueError("the messages use every private-use character")
        return Marked(_mapped(value, partial(self._with_marks, mark=mark, names=names)), mark)

    def _with_marks(self, text: str, mark: str, names: AbstractSet[str]) -> str:
        offsets = [0, *sorted(set(self._offsets(text, names))), len(text)]
        return mark.join(text[start:end] for start, end in pairwise(offsets))

    def _offsets(self, text: str, names: AbstractSet[str]) -> Iterator[int]:
        """Yield where to cut special tokens in `text` and those that could arise at its ends; some offsets twice."""
        for window in _windows(text, self._max_length):
            for match in self._whole.finditer(text, *window):
                yield match.start() + 1
        if text in names:
            return
        yield from self._edges(text, 0, len(text))
        start = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        if 0 < end - start < len(text):  # a template may strip the string
            yield from self._edges(text, start, end)

    def _edges(self, text: str, start: int, end: int) -> set[int]:
        """Return the ends of text[start:end] at which part of a special token stands."""
        if start < end and end - start < self._max_length and text[start:end] in self._listed:
            return {start, end}
        edges: set[int] = set()
        for i in range(start + 1, min(end, start + self._max_length)):
            if text[i - 1] in self._last_chars and text[start:i] + "\0" in self._listed:
                edges.add(start)
                break
        for i in range(max(start, end - self._max_length) + 1, end):
            if text[i] in self._first_chars and "\0" + text[i:end] in self._listed:
                edges.add(end)
                break
        return edges


def _overlapping(texts: list[str]) -> re.Pattern[str]:
    """Match the first character of each occurrence, also of those that overlap."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    # One branch for each first character: ordinary text fails at once, however many special tokens there are.
    return re.compile("|".join(f"{re.escape(char)}(?={'|'.join(rest)})" for char, rest in rests.items()) or "(?!)")


def _windows(text: str, overlap: int) -> Iterator[tuple[int, int]]:
    """Cut a long text into pieces to search, because a search blocks all other threads."""
    for start in range(0, len(text), WINDOW_CHARS):
        yield start, start + WINDOW_CHARS + overlap


def _used(strings: Iterable[str]) -> set[str]:
    """The marks that occur in strings, also as `_escaped` writes them."""
    used: set[str] = set()
    for string in strings:
        for start, end in _windows(string, 5):
            used |= _ALL_MARKS.intersection(string[start:end])
            used.update(_ESCAPED.findall(string, start, end))
    return used


def _escaped(mark: str) -> str:
    """A mark as `tojson(ensure_ascii=true)` of a template writes it."""
    return json.dumps(mark)[1:-1]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Copy JSON data with every string changed, except for roles."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            _mapped(key, change): item if _is_role(key, item) else _mapped(item, change) for key, item in value.items()
        }
    return type(value)(_mapped(item, change) for item in value) if isinstance(value, list | tuple) else value


def _is_role(key: object, item: object) -> bool:
    """Roles stay, because some templates write a token around the role's name: '<|' + role + '|>'."""
    return key == "role" and isinstance(item, str) and item in _ROLES


def strip_controls(text: str) -> str:
    """Make text safe for a terminal: it cannot move the cursor, ring the bell or reverse the text.

    Drops control characters except line feed and tab, bidirectional overrides, and unpaired surrogates.
    """
    return CONTROLS.sub("", text)


def one_line(text: str, max_chars: int = 200) -> str:
    """The beginning of a text from others, for a line of the log."""
    return " ".join(strip_controls(text[:max_chars]).split())
