r"""Rewrites a regular expression of JSON Schema (ECMA 262) as `llguidance` reads it (Rust's regex-syntax), if it can.

The two differ in letters, not in meaning: `[^]`, `\cA` and a lone brace are spelled otherwise. Look-around, word
boundaries, references back and an anchor inside a text have no counterpart, since an automaton keeps no history.
"""

import re
from collections.abc import Iterator

from weft.server.json_schema.repeats import MAX_COUNTS, MAX_REPEATS, Part, joined_repeats, num_counts

MAX_PATTERN_CHARS = 8192
_MAX_GROUPS = 40  # inside one another
_MAX_REPEAT_CHARS = 1000  # of a number of repeats; more are too many, or zeros
_LAST_CODE = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)

_ESCAPE = re.compile(
    r"""\\(?:
      (?P<set>[dDwWsS]|[pP](?:[A-Z]|\{\^?(?P<property>[A-Za-z_=]+)\}))
    | (?P<letter>[afnrtv])
    | c(?P<control>[A-Za-z])
    | (?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|[xuU]\{(?P<code>[0-9a-fA-F]{1,6})\}|(?P<nul>0)(?![0-9]))
    | (?P<sign>[ !-/:;=?@\[-`{-~])
    )""",
    re.VERBOSE,
)
_FLAGS = re.compile(r"\(\?[isu]{1,3}\)")  # for the whole pattern, as Python writes them at its start
_REPEAT = re.compile(r"(?:[*+?]|\{(\d+)(,(\d+)?)?\})\??")
_OPENING = re.compile(r"\((?:\?(?:P?<[^=!<>][^<>]{0,99}>|:|[isu]{1,3}:))?(?!\?)")
_NAMED_CLASS = re.compile(r"\[:\^?(?:alpha|digit|alnum|upper|lower|space|punct|xdigit|word):\]")
_NESTED_REPEAT = re.compile(r"[*+?}]\??\)+[*+?{]")
_CODES = (("\\x{:02x}", 0x100), ("\\u{:04x}", 0x10000), ("\\U{:08x}", _LAST_CODE + 1))
_LETTERS = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
_CATEGORIES = re.compile(
    r"(?:gc=|General_Category=)?(?:L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|C[cfno]?"
    r"|Letter|(?:Uppercase|Lowercase)_Letter|Mark|Number|Decimal_Number|Punctuation|Symbol|Separator|Other)"
    r"|Alphabetic|Uppercase|Lowercase|White_Space|Emoji|ASCII|Any"
    r"|(?:sc=|scx=|Script=|Script_Extensions=)?"
    r"(?:Latin|Greek|Cyrillic|Armenian|Hebrew|Arabic|Devanagari|Thai|Hangul|Hiragana|Katakana|Han)"
)


class _NoCounterpart(Exception):
    """Something in the pattern cannot be expressed, or the pattern is no regular expression."""


def portable(pattern: str) -> str | None:
    """The same expression as `llguidance` reads it; None if there is none, or the pattern is broken."""
    try:
        flags, alternatives = _read(pattern)
        _check_anchors(alternatives, is_first=True, is_last=True)
    except _NoCounterpart:
        return None
    return flags + "|".join(map(_written, alternatives)) if num_counts(alternatives) <= MAX_COUNTS else None


def countable(pattern: str) -> str | None:
    """A regular expression for `llguidance` in which repeats of repeats are joined; None if others are too many.

    What cannot be read here stays as it is.
    """
    try:
        flags, alternatives = _read(pattern)
    except _NoCounterpart:
        return pattern
    if num_counts(alternatives) > MAX_COUNTS:
        return None
    return flags + "|".join(map(_written, alternatives)) if _NESTED_REPEAT.search(pattern) else pattern


def _read(pattern: str) -> tuple[str, list[list[Part]]]:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise _NoCounterpart
    flags = _FLAGS.match(pattern)
    reader = _Reader(pattern, flags.end() if flags else 0)
    alternatives = reader.alternatives(0)
    if reader.rest:
        raise _NoCounterpart
    return flags[0] if flags else "", alternatives


def prefix_of(pattern: str) -> str | None:
    """The text that everything which matches begins with, if that is all that the pattern asks for; else None."""
    literal = re.fullmatch(r"\^((?:[^\\^$.|?*+()\[\]{}]|\\[-_./ ])+)(?:\.\*\$?)?", pattern)
    return literal[1].replace("\\", "") if literal else None


def _check_anchors(alternatives: list[list[Part]], *, is_first: bool, is_last: bool) -> None:
    """Anchors may stand only where nothing can be before them, or behind them."""
    for parts in alternatives:
        for index, part in enumerate(parts):
            first = is_first and all(before.text == "^" for before in parts[:index])
            last = is_last and all(behind.text == "$" for behind in parts[index + 1 :])
            if part.is_anchor and (part.repeat or not (first if part.text == "^" else last)):
                raise _NoCounterpart
            once = not part.repeat
            _check_anchors(part.alternatives, is_first=first and once, is_last=last and once)


def _written(parts: list[Part]) -> str:
    return "".join(
        f"{part.text}{'|'.join(map(_written, part.alternatives))}){part.repeat}"
        if part.alternatives
        else part.text + part.repeat
        for part in parts
    )


class _Reader:
    """Reads a pattern from left to right, once. O(characters)."""

    def __init__(self, pattern: str, start: int) -> None:
        self._pattern, self._at = pattern, start

    @property
    def rest(self) -> bool:
        """Whether something is left."""
        return self._at < len(self._pattern)

    def alternatives(self, depth: int) -> list[list[Part]]:
        """Everything up to the end of the group, or of the pattern."""
        if depth > _MAX_GROUPS:
            raise _NoCounterpart
        found: list[list[Part]] = [[]]
        while self.rest and self._pattern[self._at] != ")":
            if self._pattern[self._at] == "|":
                self._at += 1
                found.append([])
            else:
                found[-1].append(self._part(depth))
        return found

    def _part(self, depth: int) -> Part:
        char = self._pattern[self._at]
        if char in "*+?":
            raise _NoCounterpart  # nothing to repeat
        if char == "(":
            part = self._group(depth)
        elif char == "[":
            part = Part(self._class())
        elif char == "\\":
            part = Part(self._escape())
        else:
            self._at += 1
            part = Part("\\" + char if char in "{}]" else char)
        part.repeat = self._repeat()
        return joined_repeats(part)

    def _group(self, depth: int) -> Part:
        opening = self._take(_OPENING)[0]
        # Nothing refers to a group, so its name does not matter.
        part = Part(opening if opening[-1] == ":" else "(", alternatives=self.alternatives(depth + 1))
        if not self.rest:
            raise _NoCounterpart
        self._at += 1
        return part

    def _repeat(self) -> str:
        found = _REPEAT.match(self._pattern, self._at)
        if found is None:
            if self._pattern.startswith("{,", self._at):
                raise _NoCounterpart  # a text to some, a number of repeats to others
            return ""
        if len(found[0]) > _MAX_REPEAT_CHARS:
            raise _NoCounterpart
        least, most = int(found[1] or 0), int(found[3] or 0)
        self._at = found.end()
        is_again = _REPEAT.match(self._pattern, self._at) is not None
        if is_again or max(least, most) > MAX_REPEATS or (found[3] and least > most):
            raise _NoCounterpart
        return found[0]

    def _take(self, expected: re.Pattern[str]) -> re.Match[str]:
        found = expected.match(self._pattern, self._at)
        if found is None:
            raise _NoCounterpart
        self._at = found.end()
        return found

    def _escape(self) -> str:
        if anchor := {"A": "^", "z": "$", "Z": "$"}.get(self._pattern[self._at + 1 : self._at + 2]):
            self._at += 2
            return anchor
        return self._escaped()[0]

    def _escaped(self) -> tuple[str, int | None]:
        """An escape as it is written, and its code; None if it stands for several characters."""
        found = self._take(_ESCAPE)
        if found["set"]:
            if found["property"] and not _CATEGORIES.fullmatch(found["property"]):
                raise _NoCounterpart
            return found[0], None
        if found["sign"]:
            return found[0], ord(found["sign"])
        if found["letter"]:
            return found[0], _LETTERS[found["letter"]]
        code = ord(found["control"]) % 32 if found["control"] else 0
        for name in ("x", "u", "code"):
            code = int(found[name], 16) if found[name] else code
        if code in _SURROGATES:
            code = self._pair(code)
        if code > _LAST_CODE:
            raise _NoCounterpart
        return next(form.format(code) for form, size in _CODES if code < size), code

    def _pair(self, high: int) -> int:
        """The character of two surrogates, as languages of UTF-16 spell it."""
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._pattern, self._at)
        if low is None or high >= 0xDC00:
            raise _NoCounterpart
        self._at = low.end()
        return 0x10000 + ((high - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)

    def _class(self) -> str:
        """A class, in which Rust takes brackets, ampersands and tildes as signs of its own."""
        start = "[^" if self._pattern.startswith("[^", self._at) else "["
        self._at += len(start)
        members = list(self._members())
        if not members:
            if start == "[^":
                return "(?s:.)"
            raise _NoCounterpart  # matches nothing
        return f"{start}{''.join(members)}]"

    def _members(self) -> Iterator[str]:
        while True:
            text, code = self._member()
            if not text:
                return
            if not self._pattern.startswith("-", self._at) or self._pattern.startswith("-]", self._at):
                yield text
                continue
            self._at += 1
            last, last_code = self._member()
            if not last:
                raise _NoCounterpart
            if code is None or last_code is None:  # beside a set, the dash is a dash
                yield f"{text}\\-{last}"
            elif code <= last_code:
                yield f"{text}-{last}"
            else:
                raise _NoCounterpart

    def _member(self) -> tuple[str, int | None]:
        """The next character or set of a class, and its code; "" at the end."""
        if not self.rest:
            raise _NoCounterpart
        char = self._pattern[self._at]
        if named := _NAMED_CLASS.match(self._pattern, self._at):
            self._at = named.end()
            return named[0], None
        if char == "\\":
            if self._pattern.startswith("\\b", self._at):
                self._at += 2
                return "\\x08", 8
            return self._escaped()
        self._at += 1
        if char == "]":
            return "", None
        return ("\\" + char if char in "[&~-^" else char), ord(char)
