"""Calls of MiniMax M3: tags named by keys, nested as the arguments are, each behind a token of its own.

    TOKEN<tool_call>
    TOKEN<invoke name="NAME">TOKEN<city>Paris TOKEN</city>TOKEN<tags>TOKEN<item>a TOKEN</item>TOKEN</tags>TOKEN</invoke>
    TOKEN</tool_call>

TOKEN is `]<]minimax[>[`; without the spaces before it. Members of a list are called `item`. A text ends at the next
token: nothing is escaped. What a text stands for is told by the schema of the tool. A call that breaks off or is
malformed is left as it stands.

Source: the chat template of MiniMax M3.
"""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from weft.server.formats import grammar as lark
from weft.server.formats.grammar import resolve, types_of
from weft.server.formats.parser import AnswerRules, OutputParser, Scanner, Steps, Tool, ToolFormat, json_text
from weft.server.formats.shared_rules import ValueRules, answer_rules
from weft.server.formats.xml_calls import raw_to_json

_TOKEN = "]<]minimax[>["
_SECTION, _INVOKE = f"{_TOKEN}<tool_call>", f'{_TOKEN}<invoke name="'
_INVOKE_END, _SECTION_END = f"{_TOKEN}</invoke>", f"{_TOKEN}</tool_call>"
_ITEM = "item"
_MAX_DEPTH = 64
_Members = list[tuple[str, str]]


class _MinimaxParser(Scanner):
    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {f'{tool.name}">': tool for tool in tools}
        super().__init__()

    def _read(self) -> Steps[None]:
        yield from self._read_content((_SECTION, _INVOKE), self._read_call)

    def _read_call(self, opening: str) -> Steps[bool]:
        """Read what follows the opening; False: it is no call, and nothing has been told."""
        if opening == _SECTION and not (yield from self._next(_INVOKE)):
            return False
        tool = self._tools.get((yield from self._next(*self._tools)) or "")
        if tool is None:
            return False
        self._begin_call(tool.name)
        separator = ""
        while (tag := (yield from self._next(_INVOKE_END, f"{_TOKEN}<"))) == f"{_TOKEN}<":
            key = yield from self._read_name()
            self._tell_arguments(f"{separator}{json_text(key)}: ")
            if not (yield from self._tell_value(key, (tool.parameters.get("properties") or {}).get(key), tool)):
                return True
            separator = ", "
        if tag is not None:
            self._tell_arguments("}")
            yield from self._next(_SECTION_END)
        return True

    def _read_name(self) -> Steps[str]:
        """Read the rest of a tag."""
        parts: list[str] = []
        yield from self._until((">",), parts.append)
        return "".join(parts)

    def _tell_value(self, key: str, schema: Any, tool: Tool) -> Steps[bool]:
        """Tell a value, a string as it comes; False: it breaks off, or is malformed."""
        if types_of(schema, tool.parameters)[:1] != ["string"]:
            value = yield from self._read_value(key, schema, tool, _MAX_DEPTH)
            self._tell_arguments(value or "")
            return value is not None
        self._tell_arguments('"')
        end = yield from self._until((f"{_TOKEN}</{key}>",), self._tell_string)
        self._tell_arguments('"' if end else "")
        return end is not None

    def _read_value(self, key: str, schema: Any, tool: Tool, depth: int) -> Steps[str | None]:
        """Read a value and its end tag as JSON; None: it breaks off, is malformed or nested too deeply."""
        schema = resolve(schema, tool.parameters)
        types = types_of(schema, tool.parameters)
        parts: list[str] = []
        members: _Members = []
        yield from self._until((_TOKEN,), parts.append)
        while (tag := (yield from self._next("<", f"</{key}>"))) == "<" and depth:
            name = yield from self._read_name()
            inner = schema.get("items") if name == _ITEM else (schema.get("properties") or {}).get(name)
            value = yield from self._read_value(name, inner, tool, depth - 1)
            if value is None or not (yield from self._next(_TOKEN)):
                return None
            members.append((name, value))
        if tag in (None, "<"):
            return None
        return _json_of("".join(parts), members, types)


def _json_of(text: str, members: _Members, types: Sequence[str]) -> str:
    """The JSON of an element that holds text, or members."""
    is_list = "array" in types or ("object" not in types and {name for name, _ in members} == {_ITEM})
    if members and is_list:
        return "[" + ", ".join(value for _, value in members) + "]"
    if members:
        return "{" + ", ".join(f"{json_text(name)}: {value}" for name, value in members) + "}"
    if not text.strip() and types and types[0] in ("array", "object"):
        return "[]" if types[0] == "array" else "{}"
    return raw_to_json(text, types)


class _Rules(ValueRules):
    """Each rule ends with the token before the end tag."""

    @override
    def _of_type(self, name: str, schema: dict[str, Any], rule: str) -> str:
        token = self._mark(_TOKEN)
        if name == "string":
            if not (within := lark.string_of(schema)):
                return "text"
            self.lines.append(lark.text_up_to(f"{rule}_text", _TOKEN, self._mark, within=within))
            return f"{rule}_text"
        if name == "array":
            item = self.value(schema["items"]) if isinstance(schema.get("items"), dict) else "anything"
            least, most = schema.get("minItems", 0), schema.get("maxItems", "")
            return f"({self._element(_ITEM, item)}){{{least},{most}}} {token}"
        if name == "object":
            return f"{self.members(schema)} {token}" if schema.get("properties") else "anything"
        return f"{lark.member_value({**schema, 'type': name}, self._tool)} {token}"

    def members(self, schema: dict[str, Any]) -> str:
        """The members of an object in the order of its schema, in Lark."""
        if not schema.get("properties") and schema.get("additionalProperties") is True:
            return "element*"
        required = schema.get("required") or ()
        properties = (schema.get("properties") or {}).items()
        return " ".join(
            f"({self._element(key, self.value(part))}){'' if key in required else '?'}" for key, part in properties
        )

    def _element(self, key: str, rule: str) -> str:
        return f"{self._mark(_TOKEN)} {lark.literal(f'<{key}>')} {rule} {lark.literal(f'</{key}>')}"

    @override
    def _literal(self, value: Any) -> str:
        text = value if isinstance(value, str) else json_text(value)
        return f"{lark.literal(text) if text else ''} {self._mark(_TOKEN)}"


class Minimax(ToolFormat):
    """Calls of MiniMax M3."""

    @override
    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _MinimaxParser(tools)

    @override
    def grammar(self, wanted: AnswerRules) -> str:
        token = wanted.mark(_TOKEN)
        more = '("\\n" call)*' if wanted.allows_many else ""
        rules = [
            answer_rules(wanted, f"{_SECTION}\n", self.markers, (_INVOKE,), '"\\n"?'),
            f'calls: call {more} "\\n" {token} "</tool_call>"\n',
            f"call: {' | '.join(f'call_{i}' for i in range(len(wanted.tools)))}\n",
            f"anything: text | element+ {token}\nelement: {token} TAG anything END_TAG\n",
            "TAG: /<[A-Za-z_][A-Za-z0-9_.-]*>/\nEND_TAG: /<\\/[A-Za-z_][A-Za-z0-9_.-]*>/\n",
            lark.text_up_to("text", _TOKEN, wanted.mark),
        ]
        for i, tool in enumerate(wanted.tools):
            values = _Rules(tool, f"value_{i}", wanted.mark)
            head = lark.literal(f'<invoke name="{tool.name}">')
            rules.append(f'call_{i}: {token} {head} {values.members(tool.parameters)} {token} "</invoke>"\n')
            rules += values.lines
        return "".join(rules)


MINIMAX_M3 = Minimax(name="minimax_m3", models="MiniMax M3", markers=(_TOKEN,), present=(r"\]<\]minimax\[>\[",))
