"""Reads text that is still arriving. A parser built on it is written as if the whole text were there.

A parser is one generator: it reads on and waits (`yield`) where the text that has come does not decide. Owns the text
that was fed and not yet read; that is never more than what may still become a marker, and, from the opening of a call
until the call is certain, that opening, which is given back as content if no call follows. White space at the end of
content is held until it is known that no call follows; behind a call it is dropped.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import lru_cache
from itertools import groupby
from json.encoder import encode_basestring
from typing import Any, TypeVar

from server.parsers.parser import Kind, Piece

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Runs until it has to wait for text; returns its argument in the end."""

_BLANKS = re.compile(r"\s*")
_SURROGATE = re.compile("[\ud800-\udfff]")


def json_text(value: Any) -> str:
    """Write JSON that UTF-8 can carry: half of a surrogate pair stays an escape.

    Raises:
        ValueError: It holds a number that JSON does not have.
    """
    return escape_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def escape_surrogates(text: str) -> str:
    """Write what is in JSON strings and cannot be in UTF-8 as escapes."""
    return text if text.isascii() else _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


@lru_cache(maxsize=256)
def _search(ends: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """What finds the first of these texts; what finds a beginning of one at the end of a text; how long that can be."""
    starts = {re.escape(end[:size]) for end in ends for size in range(1, len(end))}
    return re.compile("|".join(map(re.escape, ends))), re.compile(f"(?:{'|'.join(starts)})\\Z"), max(map(len, ends)) - 1


@lru_cache(maxsize=256)
def _choice(options: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """What matches the longest of these texts; all their beginnings that are not whole; the longest length."""
    starts = frozenset(option[:size] for option in options for size in range(len(option)))
    return re.compile("|".join(map(re.escape, sorted(options, key=len, reverse=True)))), starts, max(map(len, options))


class Scanner(ABC):
    """One output being read, with the methods of an `OutputParser`; mutated by `feed` and `finish` alone.

    Attributes:
        region: Where the text that was fed last lies.
    """

    def __init__(self) -> None:
        """Start a new output."""
        self.region = Kind.CONTENT
        self._text = ""
        self._at = 0  # what is before it has been read
        self._mark: int | None = None  # text from here on is kept; None: from _at on
        self._is_over = False
        self._pieces: list[Piece] = []
        self._blanks: list[str] = []  # white space behind content, not told yet
        self._is_after_call = False
        self._steps = self._read()
        next(self._steps)

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Read the whole output; return only when it is over."""

    def feed(self, text: str) -> list[Piece]:
        """Take text that is not empty; return what is certain now."""
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._at -= start
        self._mark = None if self._mark is None else 0
        next(self._steps)
        return self._take_pieces()

    def finish(self) -> list[Piece]:
        """The output has ended, perhaps too early: return what was still held."""
        self._is_over = True
        next(self._steps, None)
        self._tell(Kind.CONTENT, "".join(self._blanks))
        self._blanks.clear()
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        told, self._pieces = self._pieces, []
        if len(told) < 2:
            return told
        runs = groupby(told, key=lambda piece: piece.kind)
        return [Piece(kind, "".join(piece.text for piece in run)) for kind, run in runs]

    def _tell(self, kind: Kind, text: str) -> None:
        if text:
            self._pieces.append(Piece(kind, text))

    def _tell_arguments(self, text: str) -> None:
        self._tell(Kind.ARGUMENTS, text)

    def _tell_string(self, text: str) -> None:
        """Tell a part of a JSON string, without its quotes."""
        self._tell(Kind.ARGUMENTS, escape_surrogates(encode_basestring(text))[1:-1])

    def _tell_content(self, text: str) -> None:
        """Tell content, and hold its white space at the end; white space right behind a call is none of it."""
        seen = text.rstrip()
        blank = text[len(seen) :]
        if seen:
            if not self._is_after_call:
                self._tell(Kind.CONTENT, "".join(self._blanks))
            self._tell(Kind.CONTENT, seen.lstrip() if self._is_after_call else seen)
            self._blanks.clear()
            self._is_after_call = False
        if blank and not self._is_after_call:
            self._blanks.append(blank)

    def _begin_call(self, name: str) -> None:
        """It is certain that this tool is called: nothing of its opening is given back any more."""
        self._mark = None
        self._blanks.clear()
        self._is_after_call = True
        self.region = Kind.CALL
        self._tell(Kind.CALL, name)
        self._tell_arguments("{")

    def _give_back(self, opening: str) -> None:
        """No call: `opening`, which ends at the mark, is content, and the text behind it is read anew."""
        assert self._mark is not None
        self._at, self._mark = self._mark, None
        self._tell_content(opening)

    def _until(self, ends: tuple[str, ...], sink: Callable[[str], object]) -> Steps[str | None]:
        """Hand the text before the first of `ends` to `sink` as soon as it is certain; step over that end.

        Args:
            ends: None is the beginning of another.
            sink: Gets the text in pieces that are not empty.

        Returns:
            The end; None: the output has ended before.
        """
        whole, start, longest = _search(ends)
        while True:
            text, at = self._text, self._at
            found = whole.search(text, at)
            if found is not None:
                stop, self._at = found.span()
            elif self._is_over:
                stop = self._at = len(text)
            else:
                held = start.search(text, max(at, len(text) - longest))
                stop = self._at = held.start() if held else len(text)
            if at < stop:
                sink(text[at:stop])
            if found is not None or self._is_over:
                return found and found[0]
            yield

    def _next(self, *options: str, skips_blanks: bool = True) -> Steps[str | None]:
        """Step over white space, if asked, and the longest of `options` that comes next; return it.

        Returns:
            None: none of them comes, and nothing but white space has been read.
        """
        whole, starts, longest = _choice(options)
        while True:
            if skips_blanks:
                self._at = _BLANKS.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches always
            if self._is_over or self._text[self._at : self._at + longest] not in starts:
                found = whole.match(self._text, self._at)
                self._at = found.end() if found else self._at
                return found and found[0]
            yield
