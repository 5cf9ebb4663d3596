"""Reads calls with JSON arguments: an object of name and arguments, or a name in markup, then arguments."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from weft.server.formats.parser import Kind, Scanner, Steps, Tool

_ID = re.compile(r"[A-Za-z0-9_-]*")
_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = (*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "tool_call_id", "type")
_NO_ARGUMENTS = ("null", '""')


@dataclass(frozen=True, slots=True)
class Syntax:
    """What a reader has to know of how calls are written. White space is allowed between all parts.

    Attributes:
        openers: After each of them comes a call, or another opener.
        fillers: What may come after a call.
        before_name, after_name: What may come around a name that stands outside of JSON; None: it never does.
        id_marker: What comes after such a name and before an id, which is ignored.
        id_end: What comes after an id that stands before such a name, which is ignored, too; None: there is none.
        is_bare: The output may begin with a call, without an opener.
        name_is_key: A call is an object with one member: its name, and its arguments.
    """

    openers: tuple[str, ...]
    fillers: tuple[str, ...]
    before_name: tuple[str, ...] | None = None
    after_name: tuple[str, ...] = ()
    id_marker: str | None = None
    id_end: str | None = None
    is_bare: bool = False
    name_is_key: bool = False


class _NoCallError(Exception):
    """The text is not a call, or not the rest of one."""


class JsonCallParser(Scanner):
    """Reads one output."""

    def __init__(self, syntax: Syntax, tools: Sequence[Tool]) -> None:
        self._syntax = syntax
        self._names = tuple(tool.name for tool in tools)
        self._is_told = False  # the call that is being read
        super().__init__()

    def _read(self) -> Steps[None]:
        if self._syntax.is_bare:
            self._hold()
            yield from self._read_calls()
        while (opener := (yield from self._until(self._syntax.openers, self._tell_content))) is not None:
            self._hold(opener)
            self.region = Kind.CALL
            yield from self._read_calls()

    def _read_calls(self) -> Steps[None]:
        """Read call after call; give back what is none."""
        while (yield from self._read_call()):
            while (yield from self._next(*self._syntax.fillers)):
                pass
            rest = self._text[self._at :]
            if self._is_over and any(filler.startswith(rest) for filler in self._syntax.fillers):
                self._at = len(self._text)  # markup that is cut off
            self._hold()
        self._give_back()

    def _read_call(self) -> Steps[bool]:
        """Read one call, with openers before it; True: it was told."""
        self._is_told = False
        try:
            while (yield from self._next(*self._syntax.openers)):
                self.region = Kind.CALL
            yield from self._next("[")
            if (yield from self._next("{")):
                self.region = Kind.CALL
                yield from self._read_object()
            else:
                yield from self._read_name_and_arguments()
        except _NoCallError:
            if self._is_told:
                self._give_back()  # what broke it
        return self._is_told

    def _read_object(self) -> Steps[None]:
        """Read the rest of `{"name": ..., "arguments": ...}`, in any order."""
        name = arguments = ""
        while not (yield from self._next("}")):
            key = _string((yield from self._read_value()))
            if not (yield from self._next(":")):
                raise _NoCallError
            if key in _ARGUMENT_KEYS and name and not self._is_told:
                yield from self._read_arguments(name)
            elif self._syntax.name_is_key and not self._is_told:
                name = self._known(key)
                yield from self._read_arguments(name)
            elif key not in _KEYS and not self._is_told:
                raise _NoCallError  # so that content that looks like a call is not held until its end
            else:
                value = yield from self._read_value()
                if key in _NAME_KEYS and not name:
                    name = self._known(_string(value))
                elif key in _ARGUMENT_KEYS and not arguments:
                    arguments = _object_text(value)
                if name and arguments and not self._is_told:
                    self._tell_call(name, arguments)
            if not (yield from self._next(",")) and (yield from self._peek()) != "}":
                raise _NoCallError
        if not name:
            raise _NoCallError
        if not self._is_told:
            self._tell_call(name, "{}")

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise _NoCallError
        return name

    def _read_name_and_arguments(self) -> Steps[None]:
        """Read a name that stands in markup, and the arguments after it."""
        syntax = self._syntax
        if syntax.before_name is None:
            raise _NoCallError
        for part in syntax.before_name:
            yield from self._next(part)
        if syntax.id_end:
            yield from self._run(_ID)
            if not (yield from self._next(syntax.id_end)):
                raise _NoCallError
        name = yield from self._next(*self._names)
        if name is None:
            raise _NoCallError
        if syntax.id_marker and (yield from self._next(syntax.id_marker)):
            yield from self._run(_ID)
        is_marked = False
        for part in syntax.after_name:
            is_marked |= (yield from self._next(part)) is not None
        if (yield from self._peek()) != "{" and is_marked and (yield from self._next(*syntax.fillers)):
            self._tell_call(name, "{}")
        else:
            yield from self._read_arguments(name)

    def _read_arguments(self, name: str) -> Steps[None]:
        """Read the arguments and tell the call as soon as they begin."""
        if (yield from self._peek()) == "{":
            self._tell_call(name, "")
            is_whole = yield from self._json(self._tell_arguments)
            self._hold()
            if not is_whole:
                raise _NoCallError
        else:
            self._tell_call(name, _object_text((yield from self._read_value())))

    def _read_value(self) -> Steps[str]:
        """Read one JSON value."""
        yield from self._peek()
        parts: list[str] = []
        if not (yield from self._json(parts.append)):
            raise _NoCallError
        return "".join(parts)

    def _tell_call(self, name: str, arguments: str) -> None:
        """Tell the call; hold what is read after it and is not part of it."""
        self._begin_call(name, arguments)
        self._hold()
        self._is_told = True


def _string(value: str) -> str:
    with suppress(ValueError):
        if isinstance(decoded := json.loads(value, strict=False), str):
            return decoded
    raise _NoCallError


def _object_text(value: str) -> str:
    if value in _NO_ARGUMENTS:
        return "{}"
    if not value.startswith("{"):
        raise _NoCallError
    return value
