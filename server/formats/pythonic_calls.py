"""Calls written as a Python list, as Llama 3.2 and Llama 4 do with suitable templates and system prompts.

    [get_weather(city="Paris", days=3), get_time()]

A call opens with `[NAME(` of a declared tool, or with that after `<|python_start|>`, which Llama 4 writes. Arguments
are keywords, their values Python literals: strings in single, double or triple quotes, numbers, `True`, `False`,
`None`, lists and dicts. The words of JSON are accepted as well. Arguments are told as JSON while they come. A call that
breaks off or is malformed is left as it stands.
"""

import re
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from weft.server.formats import lark
from weft.server.formats.parser import AnswerRules, OutputParser, Tool, ToolFormat
from weft.server.formats.raw_values import resolve, types_of, values_of
from weft.server.formats.scanner import Scanner, Steps, json_text

_START, _END = "<|python_start|>", "<|python_end|>"
_QUOTES = ('"""', "'''", '"', "'")
_CLOSERS = {"[": "]", "{": "}"}
_KEY = re.compile(r"\s*([\w.$-]{0,256})")
_WORD = re.compile(r"\s*([\w.+-]{0,4096})")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = dict(zip("ntrbfav0\\'\"/", "\n\t\r\b\f\a\v\0\\'\"/", strict=True)) | {"\n": "", "": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class _PythonicParser(Scanner):
    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = {f"{tool.name}(": tool.name for tool in tools}
        self._openings = tuple(f"[{head}" for head in self._names)
        super().__init__()

    def _read(self) -> Steps[None]:
        yield from self._read_content((_START, *self._openings), self._read_calls)

    def _read_calls(self, opening: str) -> Steps[bool]:
        """Read what follows the opening; False: it is no call, and nothing has been told."""
        if opening == _START:
            opening = (yield from self._next(*self._openings)) or ""
        name = self._names.get(opening[1:])
        has_called = False
        while name is not None and (key := (yield from self._read_key())) is not None:
            self._begin_call(name)
            has_called = True
            separator = ""
            while key:
                self._tell_arguments(f"{separator}{json_text(key)}: ")
                if not (yield from self._read_value()):
                    return True
                separator = ", "
                sign = yield from self._next(",", ")")
                if sign == ")":
                    break
                key = (yield from self._read_key()) if sign else None
            if key is None:
                return True
            self._tell_arguments("}")
            if (yield from self._next(",", "]")) != ",":
                yield from self._next(_END)
                return True
            self._hold()
            name = self._names.get((yield from self._next(*self._names)) or "")
        if has_called:
            self._give_back()  # what follows the comma
        return has_called

    def _read_key(self) -> Steps[str | None]:
        """Read a keyword and its sign; "": the bracket that closes the call; None: neither comes."""
        if (yield from self._next(")")) is not None:
            return ""
        key = yield from self._read_word(_KEY)
        return key if key and (yield from self._next("=")) is not None else None

    def _read_value(self) -> Steps[bool]:
        """Tell one literal; False: there is none, or it breaks off."""
        closers: list[str] = []  # of the brackets that are open
        is_key, gap = False, ""
        while True:
            sign = yield from self._next(*_QUOTES, *_CLOSERS, *closers[-1:])
            if sign is None:
                word = yield from self._read_word(_WORD)
                written = _WORDS.get(word) or _number(word)
                if not written:
                    self._at -= len(word)
                    return False
                self._tell_arguments(gap + (json_text(written) if is_key else written))
            elif sign in _QUOTES:
                if not (yield from self._read_string(gap, sign)):
                    return False
            elif sign in _CLOSERS and not is_key:
                self._tell_arguments(gap + sign)
                closers.append(_CLOSERS[sign])
                is_key, gap = sign == "{", ""
                continue
            elif sign in closers and gap != ": ":
                self._tell_arguments(closers.pop())
                is_key = False
            else:
                return False
            while closers and not is_key:
                sign = yield from self._next(",", closers[-1])
                if sign is None or sign == ",":
                    break
                self._tell_arguments(closers.pop())
            if not closers:
                return True
            if is_key:
                sign = yield from self._next(":")
            if sign is None:
                return False
            is_key, gap = not is_key and closers[-1] == "}", f"{sign} "

    def _read_string(self, gap: str, quote: str) -> Steps[bool]:
        """Tell a string, whose quote has been read, after `gap`; False: the output ended first."""
        self._tell_arguments(gap + '"')
        while (end := (yield from self._until((quote, "\\"), self._tell_string))) == "\\":
            letter = yield from self._take(1)
            digits = yield from self._take(_HEX_DIGITS.get(letter, 0))
            if digits and re.fullmatch(f"[0-9a-fA-F]{{{_HEX_DIGITS[letter]}}}", digits) and int(digits, 16) < 0x110000:
                self._tell_string(chr(int(digits, 16)))
            else:
                self._tell_string(_ESCAPES.get(letter, f"\\{letter}{digits}"))
        if end is not None:
            self._tell_arguments('"')
        return end is not None

    def _read_word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Step over white space and the longest match, which may be empty."""
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None and (match.end() < len(self._text) or self._is_over):
                self._at = match.end()
                return match[1]
            yield

    def _take(self, size: int) -> Steps[str]:
        """Step over that many characters, or as many as there are."""
        while len(self._text) - self._at < size and not self._is_over:
            yield
        taken = self._text[self._at : self._at + size]
        self._at += len(taken)
        return taken


def _number(word: str) -> str:
    """A number of Python as JSON; "" if it is none."""
    for read in (lambda: int(word, 0), lambda: float(word)):
        try:
            return json_text(read())
        except ValueError:
            continue
    return ""


class Pythonic(ToolFormat):
    """Calls as a Python list."""

    @override
    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _PythonicParser(tools)

    @override
    def grammar(self, wanted: AnswerRules) -> str:
        # Keywords come in the order of the schema; lists and dicts are written as in JSON.
        tools, mark = wanted.tools, wanted.mark
        more = '(", " call)* "]"' if wanted.allows_many else '"]"'
        listed = f'"[" call {more}'
        rules: list[str] = []
        if wanted.is_required or wanted.content is not None:
            content = "" if wanted.is_required else f"{wanted.content} | "
            rules.append(f"answer: {content}{mark(_START)} {listed} {mark(_END)}? | {listed}\n")
        else:
            openings = [f"[{tool.name}(" for tool in tools]
            begun = " | ".join(f"before_{i} arguments_{i}" for i in range(len(tools)))
            rules.append(f"answer: PLAIN | ({begun}) {more} | started {listed} {mark(_END)}?\n")
            rules.append(f"PLAIN: {lark.text_without([_START, *openings])}\n")
            rules.append(lark.text_up_to("started", _START, mark, openings))
            rules += [f"before_{i}[lazy]: PLAIN {lark.literal(opening)}\n" for i, opening in enumerate(openings)]
        rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}\n")
        for i, tool in enumerate(tools):
            rules.append(f"call_{i}: {lark.literal(f'{tool.name}(')} arguments_{i}\n")
            rules.append(_arguments(f"arguments_{i}", tool))
        return "".join(rules) + _SINGLE_QUOTED


_SINGLE_QUOTED = r"""SINGLE_QUOTED: /'([^'\\\x00-\x1f\x7f]|\\['"\\nrt])*'/""" + "\n"


def _arguments(rule: str, tool: Tool) -> str:
    """Define the rule: keywords and the bracket after them, and one more rule for what may follow each keyword."""
    properties = tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or ()
    lines: list[str] = []
    firsts: list[str] = []
    for i, (key, value) in enumerate(properties.items()):
        firsts.append(f"{rule}_{i} {rule}_from_{i + 1}")
        lines.append(f"{rule}_{i}: {lark.literal(f'{key}=')} {_value(value, tool)}\n")
        lines.append(f'{rule}_from_{i}: (", " {rule}_{i}){"" if key in required else "?"} {rule}_from_{i + 1}\n')
    lines.append(f'{rule}_from_{len(properties)}: ")"\n')
    num_firsts = next((i + 1 for i, key in enumerate(properties) if key in required), None)
    firsts = firsts[:num_firsts] if num_firsts else [*firsts, '")"']
    return f"{rule}: {' | '.join(firsts)}\n" + "".join(lines)


def _value(schema: Any, tool: Tool) -> str:
    """The literals of a schema: JSON, the words that Python spells otherwise, and strings in single quotes."""
    resolved = resolve(schema, tool.parameters)
    options = [lark.member_value(schema, tool)]
    if (values := values_of(resolved)) is not None:
        options += [lark.literal(repr(value)) for value in values if isinstance(value, str | bool) or value is None]
    else:
        types = types_of(schema, tool.parameters)
        options += ['"True" | "False"'] if not types or "boolean" in types else []
        options += ['"None"'] if not types or "null" in types else []
        if "string" in types and resolved.keys() <= {"type", "title", "description", "default"}:
            options.append("SINGLE_QUOTED")
    return f"({' | '.join(options)})"


PYTHONIC = Pythonic(name="pythonic", markers=(_START, _END), present=(r"\[func_name1\(",))
"""The templates of the same models for calls in JSON have no such instruction."""
