"""Calls whose arguments are raw text between tags: Qwen3-Coder, GLM 4.5 and later, MiniMax M2, Seed-OSS, Step 3.

Qwen3-Coder (its chat template; vLLM and SGLang read it likewise, also without the outer tag, which it may forget; Qwen
3.5, Nemotron 3 and Step 3.5 write the same):

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

GLM (line breaks until 4.6, none from 4.7 on):

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

MiniMax M2 and Step 3 put all calls into one section:

    <minimax:tool_call>
    <invoke name="NAME">
    <parameter name="KEY">VALUE</parameter>
    </invoke>
    </minimax:tool_call>

A value ends at the first end tag: nothing is escaped. One line break at either end of a Qwen value belongs to the
format. A call that breaks off or is malformed is left as it stands: no argument is made up to close it.
"""

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from weft.server.formats import grammar as lark
from weft.server.formats.grammar import _MAX_LITERAL, _PYTHON_TYPES, resolve, types_of, values_of
from weft.server.formats.parser import AnswerRules, Mark, OutputParser, Scanner, Steps, Tool, ToolFormat, json_text


class _XmlParser(Scanner):
    def __init__(self, tools: Sequence[Tool], format: "XmlFormat") -> None:
        self._format = format
        self._tools = {tool.name + format.name_tags[1]: tool for tool in tools}
        value_end = format.value_tags[1]
        self._value_ends = tuple(dict.fromkeys((value_end, value_end.strip())))
        super().__init__()

    def _read(self) -> Steps[None]:
        yield from self._read_content(self._format.openings, self._read_call)

    def _read_call(self, opening: str) -> Steps[bool]:
        """Read what follows the opening; False: it is no call, and nothing has been told."""
        before_name, before_value = self._format.name_tags[0], self._format.value_tags[0].strip()
        before_key, after_key = self._format.key_tags
        ends = self._format.ends
        if before_name and opening == self._format.openings[0] and not (yield from self._next(before_name)):
            return False
        name = yield from self._next(*self._tools)
        tag = name and (yield from self._next(before_key, *ends))
        if name is None or tag is None:
            return False
        tool = self._tools[name]
        properties = tool.parameters.get("properties") or {}
        self._begin_call(tool.name)
        separator = ""
        while tag == before_key:
            parts: list[str] = []
            if (yield from self._until((after_key,), parts.append)) is None:
                return True
            key = "".join(parts)
            if before_value and (yield from self._next(before_value)) is None:
                return True
            self._tell_arguments(f"{separator}{json_text(key)}: ")
            if not (yield from self._read_value(types_of(properties.get(key), tool.parameters))):
                return True
            separator = ", "
            tag = yield from self._next(before_key, *ends)
        if tag is not None:
            self._tell_arguments("}")
            while tag in ends[:-1]:
                tag = yield from self._next(*ends[ends.index(tag) + 1 :])
        return True

    def _read_value(self, types: list[str]) -> Steps[bool]:
        """Read a value and its end tag; False: the output ended first."""
        if self._format.value_tags[1].startswith("\n"):
            yield from self._next("\n", skips_blanks=False)
        is_text = types[:1] == ["string"]  # which is told as it comes
        parts: list[str] = []
        if is_text:
            self._tell_arguments('"')
        end = yield from self._until(self._value_ends, self._tell_string if is_text else parts.append)
        if end is not None:
            self._tell_arguments('"' if is_text else raw_to_json("".join(parts), types))
        return end is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlFormat(ToolFormat):
    """A format that is described by its tags.

    Attributes:
        line_break: Between the parts, in Lark.
        openings: A call begins with any of these; the first is the one that grammars ask for.
        name_tags, key_tags, value_tags: The tags before and after these; "" for none. A line break around a value may
            be missing.
        ends: What closes a call; of several, the last may be missing.
        is_section: The first opening and the last end are around all calls together, not around each.
    """

    line_break: str
    openings: tuple[str, ...]
    name_tags: tuple[str, str] = ("", "")
    key_tags: tuple[str, str]
    value_tags: tuple[str, str]
    ends: tuple[str, ...]
    is_section: bool = False

    @override
    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _XmlParser(tools, self)

    @override
    def grammar(self, wanted: AnswerRules) -> str:
        # Parameters come in the order of the schema; a string is text up to its end tag.
        tools, mark, content, is_required = wanted.tools, wanted.mark, wanted.content, wanted.is_required
        opening, *others = self.openings
        again = "call" if self.is_section else f"BREAKS? {mark(opening)} call"
        calls = f"call ({again})*" if wanted.allows_many else "call"
        if self.is_section:
            calls += " " + self._spell("\n" + self.ends[-1], mark)
        rules = ["BREAKS: /\\n{1,2}/\n"]
        if is_required or content is not None:
            rules.append(f"answer: {'' if is_required else f'{content} | '}BREAKS? {mark(opening)} {calls}\n")
        else:
            rules.append(f"answer: PLAIN | before {calls}\nPLAIN: {lark.text_without(self.openings)}\n")
            rules.append(lark.text_up_to("before", opening, mark, others))
        rules.append(self._text("text", mark))
        rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}\n")
        for i, tool in enumerate(tools):
            rules += self._call(f"call_{i}", tool, mark)
        return "".join(rules)

    def _call(self, rule: str, tool: Tool, mark: Mark) -> list[str]:
        """The rule for what follows the opening of a call, and the rules that it needs."""
        begin = "\n" if self.name_tags[0] else ""
        parts = [self._spell(begin + tool.name.join(self.name_tags), mark)]
        rules = []
        for i, (key, schema) in enumerate((tool.parameters.get("properties") or {}).items()):
            head = self._spell(f"\n{key.join(self.key_tags)}{self.value_tags[0]}", mark)
            is_optional = key not in (tool.parameters.get("required") or ())
            value = self._value(schema, tool, mark)
            within = lark.string_of(resolve(schema, tool.parameters)) if value == "text" else None
            if within:
                value = f"{rule}_{i}"
                rules.append(self._text(value, mark, within))
            parts.append(f"({head} {value}){'?' if is_optional else ''}")
        if "properties" not in tool.parameters and tool.parameters.get("additionalProperties") is True:
            before, after = self._spell("\n" + self.key_tags[0], mark), self.key_tags[1] + self.value_tags[0]
            parts.append(f"({before} {lark.ANY_KEY} {self._spell(after, mark)} text)*")
        ends = self.ends[:-1] if self.is_section else self.ends
        parts.append(self._spell("".join(f"\n{end}" for end in ends), mark))
        return [f"{rule}: {' '.join(parts)}\n", *rules]

    def _text(self, rule: str, mark: Mark, within: str | None = None) -> str:
        """The rule for the text of a value and its end tag."""
        end = self.value_tags[1]
        return lark.text_up_to(rule, end, mark, (end.strip(),), within=within)

    def _spell(self, text: str, mark: Mark) -> str:
        """Write text of the format in Lark, with the format's line breaks."""
        lines = (lark.spell(line, self.markers, mark) for line in text.split("\n"))
        return f" {self.line_break} ".join(lines)

    def _value(self, schema: Any, tool: Tool, mark: Mark) -> str:
        """Write a value and its end tag in Lark; "text" is the rule for any string."""
        end = lark.spell(self.value_tags[1], self.markers, mark)
        resolved = resolve(schema, tool.parameters)
        if (values := values_of(resolved)) is not None:
            words = [value if isinstance(value, str) else json_text(value) for value in values]
            return f"({' | '.join(f'{lark.literal(word)} {end}' if word else end for word in words)})"
        types = types_of(schema, tool.parameters)
        if not types or "string" in types:
            return "text"
        return f"{lark.member_value(schema, tool)} {end}"


QWEN3_CODER = XmlFormat(
    name="qwen3_coder",
    models="Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5",
    markers=("<tool_call>", "</tool_call>"),
    present=("<tool_call>", "<function=", "<parameter="),
    line_break='"\\n"',
    openings=("<tool_call>", "<function="),
    name_tags=("<function=", ">"),
    key_tags=("<parameter=", ">"),
    value_tags=("\n", "\n</parameter>"),
    ends=("</function>", "</tool_call>"),
)
GLM = XmlFormat(
    name="glm",
    models="GLM 4.5 and later",
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    present=("<tool_call>", "<arg_key>", "<arg_value>"),
    line_break='"\\n"?',
    openings=("<tool_call>",),
    key_tags=("<arg_key>", "</arg_key>"),
    value_tags=("\n<arg_value>", "</arg_value>"),
    ends=("</tool_call>",),
)
SEED = XmlFormat(
    name="seed",
    models="Seed-OSS",
    markers=("<seed:tool_call>", "</seed:tool_call>"),
    present=("<seed:tool_call>", "<function="),
    line_break='"\\n"',
    openings=("<seed:tool_call>",),
    name_tags=("<function=", ">"),
    key_tags=("<parameter=", ">"),
    value_tags=("", "</parameter>"),
    ends=("</function>", "</seed:tool_call>"),
)
MINIMAX_M2 = XmlFormat(
    name="minimax_m2",
    models="MiniMax M2",
    markers=("<minimax:tool_call>", "</minimax:tool_call>"),
    present=("<minimax:tool_call>", "<invoke name="),
    line_break='"\\n"',
    openings=("<minimax:tool_call>", '<invoke name="'),
    name_tags=('<invoke name="', '">'),
    key_tags=('<parameter name="', '">'),
    value_tags=("", "</parameter>"),
    ends=("</invoke>", "</minimax:tool_call>"),
    is_section=True,
)
_STEP_CALL, _STEP_SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_sep｜>"  # noqa: RUF001 (as Step writes it)
_STEP_END, _STEP_CALLS = "<｜tool_call_end｜>", ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>")  # noqa: RUF001
_STEP_HEAD = f'{_STEP_CALL}function{_STEP_SEPARATOR}<steptml:invoke name="'
STEP3 = XmlFormat(
    name="step3",
    models="Step 3",
    markers=(*_STEP_CALLS, _STEP_CALL, _STEP_SEPARATOR, _STEP_END),
    present=("<steptml:invoke",),
    line_break='"\\n"?',
    openings=(_STEP_CALLS[0], _STEP_HEAD),
    name_tags=(_STEP_HEAD, '">'),
    key_tags=('<steptml:parameter name="', '">'),
    value_tags=("", "</steptml:parameter>"),
    ends=("</steptml:invoke>", _STEP_END, _STEP_CALLS[1]),
    is_section=True,
)
ALL = (QWEN3_CODER, GLM, SEED, MINIMAX_M2, STEP3)


def raw_to_json(text: str, types: Sequence[str]) -> str:
    """Write a whole raw value as JSON of the first of `types` that it fits, else as a string.

    Without types, text that is JSON is taken as JSON, because templates write everything but strings so. Literals of
    Python count as their JSON, because some templates write those.
    """
    try:
        value = _value(text.strip())
        written = json_text(value)
    except (ValueError, RecursionError):
        return json_text(text)
    fits = next((name for name in types if name == "string" or type(value) in _PYTHON_TYPES[name]), "string")
    return json_text(text) if types and fits == "string" else written


def _value(word: str) -> Any:
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(word, word))
    except ValueError:
        if word[:1] not in ("{", "[") or len(word) > _MAX_LITERAL:
            raise
    try:
        # Back from JSON, in which keys are strings and there are no other types.
        return json.loads(json_text(ast.literal_eval(word)))
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError(word) from error
