"""Finds the end of one JSON value in text that comes in pieces; each character is looked at once.

Follows strings and nesting and refuses what cannot stand between strings, so that markup behind a value that lacks a
bracket is seen. It does not check more: what a model writes as arguments is passed on as it is.
"""

import re

_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r"[ \t\r\n,:0-9+\-.eEtrufalsn]*")
_SCALAR = re.compile(r"[0-9+\-.eEtrufalsn]*")


class JsonScanner:
    """One value; mutated by `scan` alone.

    Attributes:
        is_finished: The value has ended.
        is_broken: What came is no JSON; the character that cannot be is the first behind the scanned ones.
    """

    def __init__(self) -> None:
        self.is_finished = False
        self.is_broken = False
        self._depth = 0
        self._is_scalar = False
        self._is_string = False
        self._is_escaped = False

    def scan(self, text: str, start: int) -> int:
        """Look at the text from `start` on; return where the value ends or breaks, or the length of the text."""
        at = start
        while at < len(text) and not (self.is_finished or self.is_broken):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
            elif self._is_string:
                at = self._scan_string(text, at)
            elif self._is_scalar:
                at = _end(_SCALAR, text, at)
                self.is_finished = at < len(text)
            else:
                at = self._scan_structure(text, at)
        return at

    def _scan_string(self, text: str, at: int) -> int:
        at = _end(_IN_STRING, text, at)
        if at == len(text):
            return at
        self._is_escaped = text[at] == "\\"
        self._is_string = self._is_escaped
        self.is_finished = not self._is_string and self._depth == 0
        return at + 1

    def _scan_structure(self, text: str, at: int) -> int:
        if self._depth > 0:
            at = _end(_BETWEEN, text, at)
            if at == len(text):
                return at
        character = text[at]
        if character == '"':
            self._is_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth > 0:
            self._depth -= 1
            self.is_finished = self._depth == 0
        elif _end(_SCALAR, text, at) > at:
            self._is_scalar = True
            return at
        else:
            self.is_broken = True
            return at
        return at + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
