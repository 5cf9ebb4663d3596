"""Reads calls whose arguments are JSON: an object with name and arguments, or a name in markup, then the arguments.

Owns the text that is not told yet: what may still become a marker, white space that may lie before a call, and a call
until its name is known and its arguments begin. If no call comes of it, it is content, exactly as it was written.
Every decision looks at the text alone, never at where a piece ended. Markup and white space behind a call are dropped.
"""

import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from server.parsers.json_scanner import JsonScanner
from server.parsers.markers import any_of, num_held
from server.parsers.parser import Kind, Piece, Tool

_SPACES = " \t\r\n"
_SPACE = re.compile(r"[ \t\r\n]*")
_ID = re.compile(r"[A-Za-z0-9_-]*")

_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = ("name", *_ARGUMENT_KEYS, "id", "type")
_NO_ARGUMENTS = ("null", '""')

_T = TypeVar("_T")
_Reading = Generator[None, None, _T]
"""Reads on until the text that is there does not suffice, then waits for the next piece."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """How calls are written, as far as a reader has to know; white space is allowed between all of these.

    Attributes:
        openers: Behind each of them comes a call, or another opener.
        fillers: What may come behind a call.
        before_name, after_name: What may come around a name that stands outside of JSON; None: it never does.
        id_marker: What comes behind such a name and before an id, which is ignored.
        is_bare: The output may begin with a call, without an opener.
    """

    openers: tuple[str, ...]
    fillers: tuple[str, ...]
    before_name: tuple[str, ...] | None = None
    after_name: tuple[str, ...] = ()
    id_marker: str | None = None
    is_bare: bool = False


class _NoCallError(Exception):
    """What comes cannot be a call, or not the rest of one."""


class JsonCallParser:
    """An `OutputParser` for one output; mutated by its two methods alone."""

    def __init__(self, syntax: Syntax, tools: Sequence[Tool]) -> None:
        self.region = Kind.CONTENT
        self._syntax = syntax
        self._opener = any_of(syntax.openers)
        self._names = tuple(tool.name for tool in tools)
        self._text = ""
        self._at = 0  # what lies before is consumed
        self._has_ended = False
        self._held: list[str] = []  # consumed, and content unless a call comes of it
        self._is_told = False  # the call that is being read
        self._pieces: list[Piece] = []
        self._reading = self._read()
        next(self._reading)

    def feed(self, text: str) -> list[Piece]:
        """See `OutputParser`."""
        self._text, self._at = self._text[self._at :] + text, 0
        next(self._reading)
        return self._take_pieces()

    def finish(self) -> list[Piece]:
        """See `OutputParser`."""
        self._has_ended = True
        next(self._reading, None)
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _tell(self, kind: Kind, text: str) -> None:
        if not text:
            return
        if self._pieces and self._pieces[-1].kind is kind:
            text = self._pieces.pop().text + text
        self._pieces.append(Piece(kind, text))

    def _tell_call(self, name: str, arguments: str = "") -> None:
        self._held.clear()
        self._pieces.append(Piece(Kind.CALL, name))
        self._tell(Kind.ARGUMENTS, arguments)
        self._is_told = True

    def _give_back(self, is_last: bool = False) -> None:
        """Tell what is held as content, but not the white space at its end unless nothing follows."""
        held = "".join(self._held)
        told = held if is_last else held.rstrip(_SPACES)
        self._held = [held[len(told) :]] if len(told) < len(held) else []
        if told:
            self.region = Kind.CONTENT
            self._tell(Kind.CONTENT, told)

    # Reading text: each of these consumes, and holds what it consumed.

    def _more(self) -> _Reading[bool]:
        """Wait for the next piece; False: the output has ended."""
        if not self._has_ended:
            yield
        return not self._has_ended

    def _consume(self, end: int) -> None:
        if end > self._at:
            self._held.append(self._text[self._at : end])
            self._at = end

    def _skip(self, run: re.Pattern[str]) -> _Reading[None]:
        while True:
            match = run.match(self._text, self._at)
            self._consume(match.end() if match else self._at)
            if self._at < len(self._text) or not (yield from self._more()):
                return

    def _accept(self, options: Sequence[str]) -> _Reading[str]:
        """Consume the longest option that comes next; "" if none does."""
        while True:
            rest = self._text[self._at :]
            may_grow = any(len(rest) < len(option) and option.startswith(rest) for option in options)
            if not may_grow or not (yield from self._more()):
                break
        found = max((option for option in options if rest.startswith(option)), key=len, default="")
        self._consume(self._at + len(found))
        return found

    def _spaced(self, option: str) -> _Reading[bool]:
        yield from self._skip(_SPACE)
        return bool((yield from self._accept((option,))))

    def _value(self) -> _Reading[str]:
        """Consume one JSON value and return it."""
        scanner = JsonScanner()
        parts: list[str] = []
        while not scanner.is_finished:
            end = scanner.scan(self._text, self._at)
            parts.append(self._text[self._at : end])
            self._consume(end)
            if scanner.is_broken or not (scanner.is_finished or (yield from self._more())):
                raise _NoCallError
        return "".join(parts)

    def _tell_value(self) -> _Reading[None]:
        """Consume one JSON value and tell it as arguments while it comes."""
        scanner = JsonScanner()
        while not scanner.is_finished:
            end = scanner.scan(self._text, self._at)
            self._tell(Kind.ARGUMENTS, self._text[self._at : end])
            self._at = end
            if scanner.is_broken or not (scanner.is_finished or (yield from self._more())):
                raise _NoCallError

    # The output, from its whole to its parts.

    def _read(self) -> _Reading[None]:
        if self._syntax.is_bare:
            yield from self._skip(_SPACE)
            yield from self._calls()
        while (yield from self._content()):
            self.region = Kind.CALL
            yield from self._calls()

    def _content(self) -> _Reading[bool]:
        """Tell content until an opener is consumed; False: the output has ended."""
        while True:
            match = self._opener.search(self._text, self._at)
            if match:
                self._pass_on(match.start())
                self._consume(match.end())
                return True
            self._pass_on(len(self._text) - num_held(self._text, self._syntax.openers, self._at))
            if not (yield from self._more()):
                self._consume(len(self._text))
                self._give_back(is_last=True)
                return False

    def _pass_on(self, end: int) -> None:
        is_blank = not self._text[self._at : end].strip(_SPACES)
        self._consume(end)
        if not is_blank:
            self._give_back()

    def _calls(self) -> _Reading[None]:
        """Read call after call; what is none is given back."""
        while (yield from self._call()):
            while True:
                yield from self._skip(_SPACE)
                if not (yield from self._accept(self._syntax.fillers)):
                    break
            rest = self._text[self._at :]
            if self._has_ended and any(filler.startswith(rest) for filler in self._syntax.fillers):
                self._at = len(self._text)  # markup that is cut off
            self._held.clear()
        self._give_back()

    def _call(self) -> _Reading[bool]:
        """Read one call, with openers before it; True: it was told."""
        self._is_told = False
        try:
            yield from self._skip(_SPACE)
            while (yield from self._accept(self._syntax.openers)):
                self.region = Kind.CALL
                yield from self._skip(_SPACE)
            if (yield from self._accept(("[",))):
                yield from self._skip(_SPACE)
            if (yield from self._accept(("{",))):
                self.region = Kind.CALL
                yield from self._object()
            else:
                yield from self._name_and_arguments()
            self._held.clear()
        except _NoCallError:
            if self._is_told:
                self._give_back()  # what broke it
        return self._is_told

    def _object(self) -> _Reading[None]:
        """Read the rest of `{"name": ..., "arguments": ...}`, whatever their order."""
        name = arguments = ""
        while not (yield from self._spaced("}")):
            key = _string((yield from self._value()))
            if not (yield from self._spaced(":")):
                raise _NoCallError
            yield from self._skip(_SPACE)
            if key in _ARGUMENT_KEYS and name and not self._is_told:
                yield from self._arguments(name)
            elif key not in _KEYS and not self._is_told:
                raise _NoCallError  # so that content that looks like a call is not held until its end
            else:
                value = yield from self._value()
                if key == "name" and not name:
                    name = _string(value)
                    if name not in self._names:
                        raise _NoCallError
                elif key in _ARGUMENT_KEYS and not arguments:
                    arguments = _object_text(value)
                if name and arguments and not self._is_told:
                    self._tell_call(name, arguments)
            if not (yield from self._spaced(",")) and not self._text.startswith("}", self._at):
                raise _NoCallError
        if not name:
            raise _NoCallError
        if not self._is_told:
            self._tell_call(name, "{}")

    def _name_and_arguments(self) -> _Reading[None]:
        """Read a name that stands in markup, and the arguments behind it."""
        syntax = self._syntax
        if syntax.before_name is None:
            raise _NoCallError
        yield from self._markup(syntax.before_name)
        name = yield from self._accept(self._names)
        if not name:
            raise _NoCallError
        yield from self._skip(_SPACE)
        if syntax.id_marker and (yield from self._accept((syntax.id_marker,))):
            yield from self._skip(_ID)
        is_marked = yield from self._markup(syntax.after_name)
        if self._text.startswith("{", self._at) or not (is_marked and (yield from self._accept(syntax.fillers))):
            yield from self._arguments(name)
        else:
            self._tell_call(name, "{}")

    def _markup(self, parts: Sequence[str]) -> _Reading[bool]:
        """Skip these texts, of which some may be missing, and white space; True: one of them came."""
        num_found = 0
        for part in parts:
            yield from self._skip(_SPACE)
            num_found += bool((yield from self._accept((part,))))
        yield from self._skip(_SPACE)
        return num_found > 0

    def _arguments(self, name: str) -> _Reading[None]:
        """Read the arguments and tell the call as soon as they begin."""
        if self._text.startswith("{", self._at):
            self._tell_call(name)
            yield from self._tell_value()
        else:
            self._tell_call(name, _object_text((yield from self._value())))


def _string(value: str) -> str:
    try:
        decoded = json.loads(value, strict=False)
    except ValueError:
        decoded = None
    if not isinstance(decoded, str):
        raise _NoCallError
    return decoded


def _object_text(value: str) -> str:
    if value in _NO_ARGUMENTS:
        return "{}"
    if not value.startswith("{"):
        raise _NoCallError
    return value
