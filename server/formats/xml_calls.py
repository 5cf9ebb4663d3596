"""Calls whose arguments are raw text between tags, as Qwen3-Coder and GLM 4.5 and later write them.

Qwen3-Coder (its chat template; vLLM and SGLang read it likewise, also without the outer tag, which it may forget):

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

A value ends at the first end tag: nothing is escaped. One line break at either end of a Qwen value is of the format.
A call that breaks off, or goes on as no call can, is left as it stands: no argument is made up to close it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.server.formats import lark
from weft.server.formats.parser import AnswerRules, Mark, OutputParser, Tool
from weft.server.formats.raw_values import raw_to_json, resolve, types_of, with_definitions
from weft.server.formats.scanner import Scanner, Steps, json_text


class _XmlParser(Scanner):
    def __init__(self, tools: Sequence[Tool], format: "XmlFormat") -> None:
        self._format = format
        self._names = {tool.name + format.after_name: tool for tool in tools}
        super().__init__()

    def _read(self) -> Steps[None]:
        yield from self._read_content(self._format.openings, self._read_call)

    def _read_call(self, opening: str) -> Steps[bool]:
        """Read what is behind the opening; False: it is no call, and nothing has been told."""
        format = self._format
        if not self._names or (
            format.before_name and opening == format.openings[0] and (yield from self._next(format.before_name)) is None
        ):
            return False
        name = yield from self._next(*self._names)
        tag = name and (yield from self._next(format.before_key, *format.ends))
        if name is None or tag is None:
            return False
        schema = self._names[name].parameters
        self._begin_call(self._names[name].name)
        separator = ""
        while tag == format.before_key:
            key: list[str] = []
            if (yield from self._until((format.after_key,), key.append)) is None:
                return True
            if format.before_value and (yield from self._next(format.before_value)) is None:
                return True
            self._tell_arguments(f"{separator}{json_text(''.join(key))}: ")
            properties = schema.get("properties") or {}
            if not (yield from self._read_value(types_of(properties.get("".join(key)), schema))):
                return True
            separator = ", "
            tag = yield from self._next(format.before_key, *format.ends)
        if tag is not None:
            self._tell_arguments("}")
            while tag in format.ends[:-1]:
                tag = yield from self._next(*format.ends[format.ends.index(tag) + 1 :])
        return True

    def _read_value(self, types: list[str]) -> Steps[bool]:
        """Read a value and its end tag; False: the output has ended before."""
        ends = tuple({self._format.value_end: None, self._format.after_value: None})
        if self._format.value_end.startswith("\n"):
            yield from self._next("\n", skips_blanks=False)
        if types[:1] == ["string"]:
            self._tell_arguments('"')
            if (yield from self._until(ends, self._tell_string)) is None:
                return False
            self._tell_arguments('"')
            return True
        value: list[str] = []
        if (yield from self._until(ends, value.append)) is None:
            return False
        self._tell_arguments(raw_to_json("".join(value), types))
        return True


@dataclass(frozen=True, slots=True)
class XmlFormat:
    """A `ToolFormat` that is described by its tags, in the order of a call; empty where it has nothing there.

    Attributes:
        signs: They all occur in the chat templates of its models, and not all in those of others.
        line_break: Between the parts, in Lark.
        openings: A call begins with any of these; the first is the one that grammars ask for.
        value_end: As the format itself writes `after_value`, with the line break before it.
        ends: What closes a call; of several, the last may be missing.
    """

    name: str
    markers: tuple[str, ...]
    signs: tuple[str, ...]
    line_break: str
    openings: tuple[str, ...]
    before_name: str
    after_name: str
    before_key: str
    after_key: str
    before_value: str
    after_value: str
    value_end: str
    ends: tuple[str, ...]

    def is_used_by(self, template: str) -> bool:
        """Tell from all the signs; the outer tag alone would be Hermes as well."""
        return all(sign in template for sign in self.signs)

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        """A parser for an output that may call these tools."""
        return _XmlParser(tools, self)

    def grammar(self, wanted: AnswerRules) -> str:
        """As `ToolFormat` says; parameters come in the order of the schema, a string is text up to its end tag."""
        tools, mark, content, is_required = wanted.tools, wanted.mark, wanted.content, wanted.is_required
        opening, *others = self.openings
        calls = f"call (BREAKS? {mark(opening)} call)*" if wanted.allows_many else "call"
        rules = ["BREAKS: /\\n{1,2}/\n"]
        if is_required or content is not None:
            rules.append(f"answer: {'' if is_required else f'{content} | '}BREAKS? {mark(opening)} {calls}\n")
        else:
            rules.append(f"answer: PLAIN | before {calls}\nPLAIN: {lark.text_without(self.openings)}\n")
            rules.append(lark.text_up_to("before", opening, mark, others))
        rules.append(lark.text_up_to("text", self.value_end, mark, (self.after_value,)))
        rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}\n")
        for i, tool in enumerate(tools):
            rules += self._call(f"call_{i}", tool, mark)
        return "".join(rules)

    def _call(self, rule: str, tool: Tool, mark: Mark) -> list[str]:
        """The rule of what is behind the opening of a call, and those that it needs."""
        begin = "\n" if self.before_name else ""
        parts = [self._spell(begin + self.before_name + tool.name + self.after_name, mark)]
        rules = []
        for i, (key, schema) in enumerate((tool.parameters.get("properties") or {}).items()):
            head = self._spell(f"\n{self.before_key}{key}{self.after_key}\n{self.before_value}", mark)
            is_optional = key not in (tool.parameters.get("required") or ())
            value = self._value(schema, tool, mark)
            within = lark.string_of(resolve(schema, tool.parameters)) if value == "text" else None
            if within:
                value = f"{rule}_{i}"
                rules.append(lark.text_up_to(value, self.value_end, mark, (self.after_value,), within=within))
            parts.append(f"({head} {value}){'?' if is_optional else ''}")
        parts.append(self._spell("".join(f"\n{end}" for end in self.ends), mark))
        return [f"{rule}: {' '.join(parts)}\n", *rules]

    def _spell(self, text: str, mark: Mark) -> str:
        """Text of the format, where a line break is the format's."""
        lines = (lark.spell(line, self.markers, mark) for line in text.split("\n"))
        return f" {self.line_break} ".join(lines)

    def _value(self, schema: Any, tool: Tool, mark: Mark) -> str:
        """A value and its end tag."""
        root = tool.parameters
        end = lark.spell(self.value_end, self.markers, mark)
        resolved = resolve(schema, root)
        if "enum" in resolved or "const" in resolved:
            words = [
                value if isinstance(value, str) else json_text(value)
                for value in resolved.get("enum", [resolved.get("const")])
            ]
            return f"({' | '.join(f'{lark.literal(word)} {end}' if word else end for word in words)})"
        types = types_of(schema, root)
        if not types or "string" in types:
            return "text"
        return f"{lark.json_value(with_definitions(schema, root), is_lenient=not tool.is_strict)} {end}"


QWEN3_CODER = XmlFormat(
    name="qwen3_coder",
    markers=("<tool_call>", "</tool_call>"),
    signs=("<tool_call>", "<function=", "<parameter="),
    openings=("<tool_call>", "<function="),
    before_name="<function=",
    after_name=">",
    before_key="<parameter=",
    after_key=">",
    before_value="",
    after_value="</parameter>",
    value_end="\n</parameter>",
    ends=("</function>", "</tool_call>"),
    line_break='"\\n"',
)
GLM = XmlFormat(
    name="glm",
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    signs=("<tool_call>", "<arg_key>", "<arg_value>"),
    openings=("<tool_call>",),
    before_name="",
    after_name="",
    before_key="<arg_key>",
    after_key="</arg_key>",
    before_value="<arg_value>",
    after_value="</arg_value>",
    value_end="</arg_value>",
    ends=("</tool_call>",),
    line_break='"\\n"?',
)
