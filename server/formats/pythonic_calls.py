"""Calls written as a Python list, as Llama 3.2 and Llama 4 do with the templates and system prompts made for it.

    [get_weather(city="Paris", days=3), get_time()]

A call opens with `[NAME(` of a declared tool, or with that behind `<|python_start|>`, which Llama 4 puts before it. The
arguments are keywords, their values literals of Python: strings with either quote, also three of them, numbers, `True`,
`False`, `None`, lists and dicts; the words of JSON are taken as well. They are told as JSON while they come. A call
that breaks off, or goes on as no call can, is left as it stands.
"""

import re
from collections.abc import Sequence
from typing import Any

from weft.server.formats import lark
from weft.server.formats.parser import AnswerRules, OutputParser, Tool
from weft.server.formats.raw_values import resolve, types_of, with_definitions
from weft.server.formats.scanner import Scanner, Steps, json_text

_START, _END = "<|python_start|>", "<|python_end|>"
_QUOTES = ('"""', "'''", '"', "'")
_CLOSERS = {"[": "]", "{": "}"}
_KEY = re.compile(r"\s*([\w.$-]{0,256})")
_WORD = re.compile(r"\s*([\w.+-]{0,4096})")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class _PythonicParser(Scanner):
    def __init__(self, tools: Sequence[Tool]) -> None:
        self._heads = {f"{tool.name}(": tool.name for tool in tools}
        self._openings = {f"[{head}": name for head, name in self._heads.items()}
        super().__init__()

    def _read(self) -> Steps[None]:
        yield from self._read_content((_START, *self._openings), self._read_calls)

    def _read_calls(self, opening: str) -> Steps[bool]:
        """Read what is behind the opening; False: it is no call, and nothing has been told."""
        if opening == _START:
            opening = (self._openings and (yield from self._next(*self._openings))) or ""
        name = self._openings.get(opening)
        has_called = False
        while name is not None and (key := (yield from self._read_key())) is not None:
            self._begin_call(name)
            has_called = True
            if key and not (yield from self._read_arguments(key)):
                return True
            self._tell_arguments("}")
            if (yield from self._next(",", "]")) != ",":
                yield from self._next(_END)
                return True
            self._hold()
            name = self._heads.get((yield from self._next(*self._heads)) or "")
        if has_called:
            self._give_back()  # what follows the comma
        return has_called

    def _read_key(self) -> Steps[str | None]:
        """Read a keyword and its sign; "": the bracket that closes the call; None: neither comes."""
        if (yield from self._next(")")) is not None:
            return ""
        key = yield from self._read_word(_KEY)
        return key if key and (yield from self._next("=")) is not None else None

    def _read_arguments(self, key: str | None) -> Steps[bool]:
        """Tell the arguments from the value of the first one on; True: up to the closing bracket."""
        separator = ""
        while key:
            self._tell_arguments(f"{separator}{json_text(key)}: ")
            if not (yield from self._read_value()):
                return False
            separator = ", "
            sign = yield from self._next(",", ")")
            if sign == ")":
                return True
            key = (yield from self._read_key()) if sign else None
        return key == ""

    def _read_value(self) -> Steps[bool]:
        """Tell one literal; False: there is none, or it breaks off."""
        open_brackets: list[str] = []  # what closes them
        is_key, gap = False, ""
        while True:
            sign = yield from self._next(*_QUOTES, *_CLOSERS, *open_brackets[-1:])
            if sign in _CLOSERS:
                if is_key:
                    return False
                self._tell_arguments(gap + sign)
                open_brackets.append(_CLOSERS[sign])
                is_key, gap = sign == "{", ""
                continue
            if sign in open_brackets[-1:]:
                if gap == ": ":
                    return False
                self._tell_arguments(open_brackets.pop())
                is_key = False
            elif sign is None:
                word = yield from self._read_word(_WORD)
                written = _number(word) if word not in _WORDS else _WORDS[word]
                if not written:
                    self._at -= len(word)
                    return False
                self._tell_arguments(gap + (json_text(written) if is_key else written))
            else:
                self._tell_arguments(gap + '"')
                if not (yield from self._read_string(sign)):
                    return False
                self._tell_arguments('"')
            while open_brackets and not is_key:
                sign = yield from self._next(",", open_brackets[-1])
                if sign is None or sign == ",":
                    break
                self._tell_arguments(open_brackets.pop())
            if not open_brackets:
                return True
            if is_key:
                sign = yield from self._next(":")
            if sign is None:
                return False
            is_key, gap = not is_key and open_brackets[-1] == "}", f"{sign} "

    def _read_string(self, quote: str) -> Steps[bool]:
        while (end := (yield from self._until((quote, "\\"), self._tell_string))) == "\\":
            letter = yield from self._take(1)
            digits = yield from self._take(_HEX_DIGITS.get(letter, 0))
            if letter in _HEX_DIGITS:
                is_character = (
                    re.fullmatch(f"[0-9a-fA-F]{{{_HEX_DIGITS[letter]}}}", digits) and int(digits, 16) < 0x110000
                )
                self._tell_string(chr(int(digits, 16)) if is_character else f"\\{letter}{digits}")
            elif letter in "\\'\"/":
                self._tell_string(letter)
            else:
                self._tell_string(_ESCAPES.get(letter, f"\\{letter}"))
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


class Pythonic:
    """A `ToolFormat`."""

    name = "pythonic"
    markers = (_START, _END)

    def is_used_by(self, template: str) -> bool:
        """Tell from the instruction: templates of the same models for calls in JSON have none like it."""
        return "[func_name1(" in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        """A parser for an output that may call these tools."""
        return _PythonicParser(tools)

    def grammar(self, wanted: AnswerRules) -> str:
        """As `ToolFormat` says; keywords come in the order of the schema, lists and dicts are written as in JSON."""
        tools, mark, content, is_required = wanted.tools, wanted.mark, wanted.content, wanted.is_required
        more = '(", " call)* "]"' if wanted.allows_many else '"]"'
        listed = f'"[" call {more}'
        rules: list[str] = []
        if is_required or content is not None:
            rules.append(
                f"answer: {'' if is_required else f'{content} | '}{mark(_START)} {listed} {mark(_END)}? | {listed}\n"
            )
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
    """Define the rule: keywords and the bracket behind them, and one more rule for what may follow each keyword."""
    properties = tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or ()
    lines: list[str] = []
    firsts: list[str] = []
    for i, (key, value) in enumerate(properties.items()):
        keyword = f"{lark.literal(f'{key}=')} {_value(value, tool)}"
        firsts.append(f"{rule}_{i} {rule}_from_{i + 1}")
        lines.append(f"{rule}_{i}: {keyword}\n")
        lines.append(f'{rule}_from_{i}: (", " {rule}_{i}){"" if key in required else "?"} {rule}_from_{i + 1}\n')
    lines.append(f'{rule}_from_{len(properties)}: ")"\n')
    num_firsts = next((i + 1 for i, key in enumerate(properties) if key in required), None)
    firsts = firsts[:num_firsts] if num_firsts else [*firsts, '")"']
    return f"{rule}: {' | '.join(firsts)}\n" + "".join(lines)


def _value(schema: Any, tool: Tool) -> str:
    """The literals of a schema: JSON, the words that Python spells otherwise, and strings with the other quote."""
    root = tool.parameters
    resolved = resolve(schema, root)
    whole = with_definitions(schema if isinstance(schema, dict) else {}, root)
    options = [lark.json_value(whole, is_lenient=not tool.is_strict)]
    values = resolved.get("enum", [resolved["const"]] if "const" in resolved else None)
    if values is not None:
        options += [lark.literal(repr(value)) for value in values if isinstance(value, str | bool) or value is None]
    else:
        types = types_of(schema, root)
        options += ['"True" | "False"'] if not types or "boolean" in types else []
        options += ['"None"'] if not types or "null" in types else []
        options += (
            ["SINGLE_QUOTED"]
            if resolved.keys() <= {"type", "title", "description", "default"} and "string" in types
            else []
        )
    return f"({' | '.join(options)})"


PYTHONIC = Pythonic()
