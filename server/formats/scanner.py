"""Reads text that is still arriving. A parser built on it is written as if the whole text were there.

A parser is one generator: it reads on and waits (`yield`) where the text that has come does not decide. Owns the text
that was fed and not yet read; that is never more than what may still become a marker. From the opening of a call until
the call is certain, what is read is also held, and is given back as content, exactly as it was written, if no call
follows. White space at the end of content is held until it is known that no call follows; behind a call it is dropped.
Every decision looks at the text alone, never at where a piece of it ended.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any, TypeVar

from weft.server.formats.parser import Kind, Piece, joined

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Runs until it has to wait for text; returns its argument in the end."""

_BLANKS = re.compile(r"\s*")
_SCALAR = re.compile(r"[0-9+\-.eEtrufalsn]*")
_BETWEEN = re.compile(r"[ \t\r\n,:0-9+\-.eEtrufalsn]*")
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
        self.region = Kind.CONTENT
        self._text = ""
        self._at = 0  # what is before it has been read
        self._mark: int | None = None  # what is read from here on is held; None: nothing is
        self._held: list[str] = []  # what was held of texts before this one
        self._is_over = False
        self._pieces: list[Piece] = []
        self._blanks: list[str] = []  # white space behind what was told, not told yet
        self._drops_blanks = False  # white space that comes next is not part of the text
        self._steps = self._read()
        next(self._steps)

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Read the whole output; return only when it is over."""

    def feed(self, text: str) -> list[Piece]:
        """Take text that is not empty; return what is certain now."""
        if self._mark is not None:
            self._held.append(self._text[self._mark : self._at])
            self._mark = 0
        self._text, self._at = self._text[self._at :] + text, 0
        next(self._steps)
        return self._take_pieces()

    def finish(self) -> list[Piece]:
        """The output has ended, perhaps too early: return what was still held."""
        self._is_over = True
        next(self._steps, None)
        self._tell_blanks(Kind.CONTENT)
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        told, self._pieces = self._pieces, []
        return joined(told)

    def _tell(self, kind: Kind, text: str) -> None:
        if text:
            self._pieces.append(Piece(kind, text))

    def _tell_arguments(self, text: str) -> None:
        self._tell(Kind.ARGUMENTS, text)

    def _tell_string(self, text: str) -> None:
        """Tell a part of a JSON string, without its quotes."""
        self._tell(Kind.ARGUMENTS, escape_surrogates(encode_basestring(text))[1:-1])

    def _tell_content(self, text: str) -> None:
        """Tell content; white space right behind a call is none of it."""
        if text.strip():
            self.region = Kind.CONTENT
        self._tell_trimmed(Kind.CONTENT, text)

    def _tell_trimmed(self, kind: Kind, text: str, blank: str | None = None) -> None:
        """Tell text, and hold the blank characters (None: white space) at its end."""
        seen = text.rstrip(blank)
        if seen:
            self._tell_blanks(kind)
            self._tell(kind, seen.lstrip(blank) if self._drops_blanks else seen)
            self._drops_blanks = False
        if len(seen) < len(text) and not self._drops_blanks:
            self._blanks.append(text[len(seen) :])

    def _tell_blanks(self, kind: Kind) -> None:
        self._tell(kind, "".join(self._blanks))
        self._blanks.clear()

    def _drop_blanks(self) -> None:
        """What was read last is markup: the white space around it is of no text."""
        self._blanks.clear()
        self._drops_blanks = True

    def _begin_call(self, name: str, arguments: str = "{") -> None:
        """It is certain that this tool is called: nothing of its opening is given back any more."""
        self._release()
        self._drop_blanks()
        self.region = Kind.CALL
        self._tell(Kind.CALL, name)
        self._tell_arguments(arguments)

    def _hold(self, opening: str = "") -> None:
        """Hold what is read from `opening` on, which was read last; forget what was held before."""
        self._held.clear()
        self._mark = self._at - len(opening)

    def _release(self) -> str:
        """Hold nothing any more; return what was held."""
        text = self._text[self._mark : self._at] if self._mark is not None else ""
        held = "".join([*self._held, text])
        self._held.clear()
        self._mark = None
        return held

    def _give_back(self) -> None:
        """No call: what was held is content."""
        self._tell_content(self._release())

    def _read_content(self, openings: tuple[str, ...], read_call: Callable[[str], Steps[bool]]) -> Steps[None]:
        """Read content to its end, and calls in it: `read_call` reads what is behind an opening; False: it is none."""
        while (opening := (yield from self._until(openings, self._tell_content))) is not None:
            self._hold(opening)
            self.region = Kind.CALL
            if not (yield from read_call(opening)):
                self._give_back()
            elif self._is_over:
                self._at = len(self._text)  # markup of the call that is cut off
            self.region = Kind.CONTENT

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

    def _peek(self) -> Steps[str]:
        """Step over white space; return the character that comes next, and do not step over it; "": none comes."""
        yield from self._run(_BLANKS)
        return self._text[self._at : self._at + 1]

    def _run(self, characters: re.Pattern[str], sink: Callable[[str], object] | None = None) -> Steps[bool]:
        """Step over what matches `characters`, any number of them, as it comes; True: there were some."""
        has_any = False
        while True:
            start, self._at = self._at, characters.match(self._text, self._at).end()  # type: ignore[union-attr]
            if start < self._at:
                has_any = True
                if sink is not None:
                    sink(self._text[start : self._at])
            if self._is_over or self._at < len(self._text):
                return has_any
            yield

    def _json_string(self, sink: Callable[[str], object]) -> Steps[bool]:
        """Hand the rest of a JSON string, its quote included, to `sink`; False: the output has ended before."""
        while (end := (yield from self._until(('"', "\\\\", '\\"'), sink))) is not None:
            sink(end)
            if end == '"':
                return True
        return False

    def _json(self, sink: Callable[[str], object]) -> Steps[bool]:
        """Hand one JSON value to `sink` while it comes; False: it breaks off, or before a character that cannot be.

        Follows strings and nesting and refuses what cannot stand between strings, so that markup behind a value that
        lacks a bracket is seen. It does not check more: what a model writes as arguments is passed on as it is.
        """
        depth = 0
        while True:
            if (yield from self._run(_BETWEEN if depth else _SCALAR, sink)) and not depth:
                return self._at < len(self._text)
            sign = yield from self._next('"', "{", "[", *(("}", "]") if depth else ()), skips_blanks=False)
            if sign is None:
                return False
            sink(sign)
            if sign != '"':
                depth += 1 if sign in "{[" else -1
            elif not (yield from self._json_string(sink)):
                return False
            if not depth:
                return True
