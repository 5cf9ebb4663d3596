"""Calls written as Python: Llama 3.2, Llama 4 and Gemma 3 with suitable templates; LFM2; OLMo 3.

    [get_weather(city="Paris", days=3), get_time()]

A call opens with `[NAME(` of a declared tool, or with that after a marker, which Llama 4 and LFM2 write. OLMo 3 writes
calls without brackets, each on a line of its own, between two tags. Arguments are keywords, their values Python
literals: strings in single, double or triple quotes, numbers, `True`, `False`, `None`, lists and dicts. The words of
JSON are accepted as well. Arguments are told as JSON while they come. A call that breaks off or is malformed is left as
it stands.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from weft.server.formats import grammar as lark
from weft.server.formats.grammar import resolve, types_of, values_of
from weft.server.formats.parser import AnswerRules, OutputParser, Scanner, Steps, Tool, ToolFormat, json_text
from weft.server.formats.shared_rules import member_rules

_QUOTES = ('"""', "'''", '"', "'")
_CLOSERS = {"[": "]", "{": "}"}
_KEY = re.compile(r"\s*([\w.$-]{0,256})")
_WORD = re.compile(r"\s*([\w.+-]{0,4096})")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = dict(zip("ntrbfav0\\'\"/", "\n\t\r\b\f\a\v\0\\'\"/", strict=True)) | {"\n": "", "": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class _PythonicParser(Scanner):
    def __init__(self, format: "Pythonic", tools: Sequence[Tool]) -> None:
        self._format = format
        self._names = {f"{tool.name}(": tool.name for tool in tools}
        self._openings = {format.before.strip() + head: name for head, name in self._names.items()}
        super().__init__()

    def _read(self) -> Steps[None]:
        openings = (self._format.begin, *(self._openings if self._format.is_bare else ()))
        yield from self._read_content(openings, self._read_calls)

    def _read_calls(self, opening: str) -> Steps[bool]:
        """Read what follows the opening; False: it is no call, and nothing has been told."""
        bracket, end = self._format.after.strip(), self._format.end
        if opening == self._format.begin:
            opening = (yield from self._next(*self._openings)) or ""
        name = self._openings.get(opening)
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
            sign = yield from self._next(",", bracket or end)
            if sign != "," and (sign or bracket):  # without brackets, nothing stands between calls
                yield from self._next(end)
                return True
            self._hold()
            name = self._names.get((yield from self._next(*self._names)) or "")
        if has_called:
            self._give_back()  # what follows the call
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pythonic(ToolFormat):
    """A format of calls as Python.

    Attributes:
        begin, end: The markers around all calls.
        before, between, after: What is written around calls and between them, inside the markers.
        is_bare: The markers may be missing.
    """

    begin: str
    end: str
    before: str = "["
    between: str = ", "
    after: str = "]"
    is_bare: bool = False

    @property
    @override
    def call_texts(self) -> Sequence[str]:
        begin, end = ("", "") if self.is_bare else (self.begin, self.end)
        return begin + self.before, "", "(", ")", self.between, self.after + end

    @override
    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _PythonicParser(self, tools)

    @override
    def grammar(self, wanted: AnswerRules) -> str:
        # Keywords come in the order of the schema; lists and dicts are written as in JSON.
        tools, mark, after = wanted.tools, wanted.mark, lark.literal(self.after)
        more = f"({lark.literal(self.between)} call)* {after}" if wanted.allows_many else after
        listed = f"{lark.literal(self.before)} call {more}"
        end = f"{mark(self.end)}{'?' if self.is_bare else ''}"
        rules: list[str] = []
        if wanted.is_required or wanted.content is not None:
            answers = [] if wanted.is_required else [str(wanted.content)]
            answers += [f"{mark(self.begin)} {listed} {end}", *([listed] if self.is_bare else ())]
            rules.append(f"answer: {' | '.join(answers)}\n")
        else:
            openings = [f"{self.before}{tool.name}(" for tool in tools] if self.is_bare else []
            begun = "".join(f" | before_{i} arguments_{i} {more}" for i in range(len(openings)))
            rules.append(f"answer: PLAIN{begun} | started {listed} {end}\n")
            rules.append(f"PLAIN: {lark.text_without([self.begin, *openings])}\n")
            rules.append(lark.text_up_to("started", self.begin, mark, openings))
            rules += [f"before_{i}[lazy]: PLAIN {lark.literal(opening)}\n" for i, opening in enumerate(openings)]
        rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}\n")
        for i, tool in enumerate(tools):
            rules.append(f"call_{i}: {lark.literal(f'{tool.name}(')} arguments_{i}\n")
            rules.append(_arguments(f"arguments_{i}", tool))
        return "".join(rules) + _SINGLE_QUOTED


_SINGLE_QUOTED = r"""SINGLE_QUOTED: /'([^'\\\x00-\x1f\x7f]|\\['"\\nrt])*'/""" + "\n"


def _arguments(rule: str, tool: Tool) -> str:
    """Define the rule: keywords and the bracket after them, and one more rule for what may follow each keyword."""
    required = tool.parameters.get("required") or ()
    properties = tool.parameters.get("properties") or {}
    if not properties and tool.parameters.get("additionalProperties") is True:
        return f'{rule}: ({rule}_0 (", " {rule}_0)*)? ")"\n{rule}_0: {lark.ANY_KEY} "=" {_value({}, tool)}\n'
    members = [
        (f"{lark.literal(f'{key}=')} {_value(value, tool)}", key in required) for key, value in properties.items()
    ]
    return member_rules(rule, members, '", "', '")"')


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


PYTHONIC = Pythonic(
    name="pythonic",
    models="Llama 3.2, Llama 4 and Gemma 3 with templates that ask for it",
    markers=("<|python_start|>", "<|python_end|>"),
    present=(r"\[func_name1\(",),  # templates of the same models for calls in JSON have no such instruction
    begin="<|python_start|>",
    end="<|python_end|>",
    is_bare=True,
)
LFM2 = Pythonic(
    name="lfm2",
    models="LFM2, LFM2.5",
    markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    present=(r"<\|tool_list_start\|>|<\|tool_call_start\|>|List of tools: \[",),
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
)
OLMO3 = Pythonic(
    name="olmo3",
    models="OLMo 3",
    markers=("<function_calls>", "</function_calls>"),
    present=("<function_calls>",),
    begin="<function_calls>",
    end="</function_calls>",
    before="\n",
    between="\n",
    after="\n",
)
ALL = (PYTHONIC, LFM2, OLMO3)
