"""Reads and constrains calls whose arguments are raw text between tags, as a table of tags describes them.

A value ends at the first end tag: nothing is escaped. Where a line break is part of the tag, it may be missing. A call
that breaks off or is malformed is left as it stands: no argument is made up to close it. The tables are in
`xml_families`.
"""

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from weft.server.formats import grammar as lark
from weft.server.formats.grammar import _MAX_LITERAL, _PYTHON_TYPES, INDEX, resolve, types_of, values_of
from weft.server.formats.parser import AnswerRules, Mark, OutputParser, Scanner, Steps, Tool, ToolFormat, json_text
from weft.server.formats.shared_rules import answer_rules, text_up_to

_DIGITS = re.compile("[0-9]{0,9}")


class _XmlParser(Scanner):
    def __init__(self, tools: Sequence[Tool], format: "XmlFormat") -> None:
        self._format = format
        behind_name, _, self._behind_index = format.name_tags[1].partition(INDEX)
        self._tools = {tool.name + behind_name: tool for tool in tools}
        self._types = {text: types for types, text in format.type_tags}
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
        if name and self._behind_index:
            yield from self._run(_DIGITS)
            name = name if (yield from self._next(self._behind_index)) else None
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
            types = types_of(properties.get(key), tool.parameters)
            if self._types:
                told = self._types.get((yield from self._next(*self._types, skips_blanks=False)) or "")
                if told is None:
                    return True
                types = ["string"] if "string" in told else [name for name in types if name in told]
            self._tell_arguments(f"{separator}{json_text(key)}: ")
            if not (yield from self._read_value(types)):
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
            be missing. INDEX stands for the number of the call.
        type_tags: What comes between key and value, by the JSON types of the value; () if that is the same for all.
        ends: What closes a call; of several, the last may be missing.
        is_section: The first opening and the last end are around all calls together, not around each.
    """

    line_break: str
    openings: tuple[str, ...]
    name_tags: tuple[str, str] = ("", "")
    key_tags: tuple[str, str]
    value_tags: tuple[str, str]
    type_tags: tuple[tuple[Sequence[str], str], ...] = ()
    ends: tuple[str, ...]
    is_section: bool = False

    @override
    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _XmlParser(tools, self)

    @override
    def grammar(self, wanted: AnswerRules) -> str:
        # Parameters come in the order of the schema; a string is text up to its end tag.
        tools, mark = wanted.tools, wanted.mark
        opening, *others = self.openings
        again = "call" if self.is_section else f"BREAKS? {self._spell(opening, mark)} call"
        calls = f"call ({again})*" if wanted.allows_many else "call"
        if self.is_section:
            calls += " " + self._spell("\n" + self.ends[-1], mark)
        rules = ["BREAKS: /\\n{1,2}/\n", f"calls: {calls}\n"]
        rules.append(answer_rules(wanted, opening, self.markers, others, "BREAKS? "))
        rules.append(self._text("text", mark))
        rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}\n")
        for i, tool in enumerate(tools):
            rules += self._call(f"call_{i}", tool, mark)
        return "".join(rules)

    def _call(self, rule: str, tool: Tool, mark: Mark) -> list[str]:
        """The rule for what follows the opening of a call, and the rules that it needs."""
        begin = "\n" if self.name_tags[0] else ""
        parts = [self._spell(begin + tool.name.join(self.name_tags), mark)]
        rules: list[str] = []
        for i, (key, schema) in enumerate((tool.parameters.get("properties") or {}).items()):
            head = self._spell(f"\n{key.join(self.key_tags)}", mark)
            is_optional = key not in (tool.parameters.get("required") or ())
            values = self._values(f"{rule}_{i}", schema, tool, mark, rules)
            parts.append(f"({head} {values}){'?' if is_optional else ''}")
        if "properties" not in tool.parameters and tool.parameters.get("additionalProperties") is True:
            before, after = self._spell("\n" + self.key_tags[0], mark), self._spell(self.key_tags[1], mark)
            parts.append(f"({before} {lark.ANY_KEY} {after} {self._values(rule, {}, tool, mark, rules)})*")
        ends = self.ends[:-1] if self.is_section else self.ends
        parts.append(self._spell("".join(f"\n{end}" for end in ends), mark))
        return [f"{rule}: {' '.join(parts)}\n", *rules]

    def _values(self, rule: str, schema: Any, tool: Tool, mark: Mark, rules: list[str]) -> str:
        """What may follow a key, in Lark; `rules` gets more rules, whose names begin with `rule`."""
        values = []
        for number, (tag, part) in enumerate(self._by_type(schema, tool)):
            value = self._value(part, tool, mark)
            within = lark.string_of(resolve(part, tool.parameters)) if value == "text" else None
            if within:
                value = f"{rule}_{number}"
                rules.append(self._text(value, mark, within))
            values.append(f"{self._spell(tag, mark)} {value}")
        return f"({' | '.join(values)})"

    def _by_type(self, schema: Any, tool: Tool) -> list[tuple[str, Any]]:
        """The tags that may stand before a value, with the schema of the values behind them."""
        if not self.type_tags:
            return [(self.value_tags[0], schema)]
        parts = ((tag, lark.of_types(schema, types, tool.parameters)) for types, tag in self.type_tags)
        return [(tag, part) for tag, part in parts if part is not None]

    def _text(self, rule: str, mark: Mark, within: str | None = None) -> str:
        """The rule for the text of a value and its end tag."""
        end = self.value_tags[1]
        return text_up_to(rule, end, self.markers, mark, (end.strip(),), within)

    def _spell(self, text: str, mark: Mark) -> str:
        """Write text of the format in Lark, with the format's line breaks."""

        def mark_part(part: str) -> str:
            return "/[0-9]{1,4}/" if part == INDEX else mark(part)

        lines = (lark.spell(line, (*self.markers, INDEX), mark_part) for line in text.split("\n"))
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
