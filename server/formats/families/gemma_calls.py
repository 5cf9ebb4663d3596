"""Calls of Gemma 4: keys without quotes, and strings between tokens of their own.

    <|tool_call>call:NAME{city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>],more:{key:true}}<tool_call|>

Nothing is escaped: a string ends at the next `<|"|>`. Keys come in alphabetical order, as the template writes them. The
quotes of JSON and words without quotes are accepted as well. Arguments are told as JSON while they come. A call that
breaks off or is malformed is left as it stands.

Source: the chat template of Gemma 4.
"""

import re
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from weft.server.formats import grammar as lark
from weft.server.formats.parser import AnswerRules, OutputParser, Scanner, Steps, Tool, ToolFormat, json_text
from weft.server.formats.shared_rules import ValueRules, answer_rules, member_rules

_BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_WORD = re.compile(r"[^,:\[\]{}<\"\s]{0,4096}")
_WORDS = {"None": "null", "True": "true", "False": "false"}
_JSON_WORD = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_MAX_DEPTH = 64


class _GemmaParser(Scanner):
    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = {f"{tool.name}{{": tool.name for tool in tools}
        super().__init__()

    def _read(self) -> Steps[None]:
        yield from self._read_content((_BEGIN,), self._read_call)

    def _read_call(self, opening: str) -> Steps[bool]:
        """Read what follows the opening; False: it is no call, and nothing has been told."""
        yield from self._next("call:")
        head = yield from self._next(*self._names)
        if head is None:
            return False
        self._begin_call(self._names[head])
        if (yield from self._read_members("}", _MAX_DEPTH)):
            yield from self._next(_END)
        return True

    def _read_members(self, end: str, depth: int) -> Steps[bool]:
        """Tell members up to the bracket that closes them; False: one is malformed, or breaks off."""
        separator = ""
        sign = yield from self._next(end)
        while sign is None:
            self._tell_arguments(separator)
            if end == "}" and not (yield from self._read_key()):
                return False
            if not (yield from self._read_value(depth)):
                return False
            separator = ", "
            if (sign := (yield from self._next(",", end))) is None:
                return False
            sign = None if sign == "," else sign
        self._tell_arguments(end)
        return True

    def _read_key(self) -> Steps[bool]:
        """Tell a key, with quotes or without, and its colon."""
        quote = yield from self._next(_QUOTE, '"')
        parts: list[str] = []
        if quote:
            yield from self._until((quote,), parts.append)
        else:
            yield from self._run(_WORD, parts.append)
        key = "".join(parts)
        if (yield from self._next(":")) is None:
            return False
        self._tell_arguments(f"{json_text(key)}: ")
        return True

    def _read_value(self, depth: int) -> Steps[bool]:
        """Tell a value; False: there is none, it is nested too deeply, or it breaks off."""
        sign = yield from self._next(_QUOTE, '"', "{", "[")
        if sign == '"':
            self._tell_arguments(sign)
            return (yield from self._json_string(self._tell_arguments))
        if sign == _QUOTE:
            self._tell_arguments('"')
            end = yield from self._until((_QUOTE,), self._tell_string)
            self._tell_arguments('"' if end else "")
            return end is not None
        if sign is not None:
            self._tell_arguments(sign)
            return bool(depth) and (yield from self._read_members({"{": "}", "[": "]"}[sign], depth - 1))
        parts: list[str] = []
        if not (yield from self._run(_WORD, parts.append)) or (self._is_over and self._at == len(self._text)):
            return False
        word = _WORDS.get(word := "".join(parts), word)
        self._tell_arguments(word if _JSON_WORD.fullmatch(word) else json_text(word))
        return True


class _Rules(ValueRules):
    @override
    def _of_type(self, name: str, schema: dict[str, Any], rule: str) -> str:
        if name == "string":
            within = lark.string_of(schema)
            if within:
                self.lines.append(lark.text_up_to(f"{rule}_text", _QUOTE, self._mark, within=within))
            return f"{self._mark(_QUOTE)} {f'{rule}_text' if within else 'text'}"
        if name == "array":
            item = self.value(schema["items"]) if isinstance(schema.get("items"), dict) else "anything"
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else max(most - 1, 0)}}}'
            listed = f'"[" {item} {more} "]"'
            return '"[" "]"' if most == 0 else listed if least else f'"[" "]" | {listed}'
        if name == "object":
            if not schema.get("properties"):
                return "object"
            self.lines.append(self.members(f"{rule}_members", schema))
            return f'"{{" {rule}_members'
        return lark.member_value({**schema, "type": name}, self._tool)

    def members(self, rule: str, schema: dict[str, Any]) -> str:
        """Define the rule for the members of an object, with the bracket that closes it."""
        if not schema.get("properties") and schema.get("additionalProperties") is True:
            return f'{rule}: (member ("," member)*)? "}}"\n'
        required = schema.get("required") or ()
        members = [
            (f"{lark.literal(f'{key}:')} {self.value(part)}", key in required)
            for key, part in sorted((schema.get("properties") or {}).items(), key=lambda member: member[0].lower())
        ]
        return member_rules(rule, members, '","', '"}"')

    @override
    def _literal(self, value: Any) -> str:
        return lark.spell(_written(value), (_QUOTE,), self._mark)


def _written(value: Any) -> str:
    """A value as the template writes it."""
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(value[key])}" for key in sorted(value, key=str.lower)) + "}"
    return "[" + ",".join(map(_written, value)) + "]" if isinstance(value, list) else json_text(value)


class Gemma(ToolFormat):
    """Calls of Gemma 4."""

    @override
    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _GemmaParser(tools)

    @override
    def grammar(self, wanted: AnswerRules) -> str:
        mark, begin, end = wanted.mark, wanted.mark(_BEGIN), wanted.mark(_END)
        more = f" ({begin} call {end})*" if wanted.allows_many else ""
        rules = [
            answer_rules(wanted, _BEGIN, self.markers),
            f"calls: call {end}{more}\n",
            f"call: {' | '.join(f'call_{i}' for i in range(len(wanted.tools)))}\n",
            lark.text_up_to("text", _QUOTE, mark),
            f"anything: {mark(_QUOTE)} text | object | list | SCALAR\n",
            "SCALAR: /true|false|null|-?(0|[1-9][0-9]*)(\\.[0-9]+)?/\nKEY: /[A-Za-z_][A-Za-z0-9_.$-]*/\n",
            'list: "[" (anything ("," anything)*)? "]"\nobject: "{" (member ("," member)*)? "}"\n',
            'member: KEY ":" anything\n',
        ]
        for i, tool in enumerate(wanted.tools):
            values = _Rules(tool, f"value_{i}", mark)
            members = values.members(f"members_{i}", tool.parameters)
            rules += [f"call_{i}: {lark.literal(f'call:{tool.name}{{')} members_{i}\n", members, *values.lines]
        return "".join(rules)


GEMMA4 = Gemma(name="gemma4", models="Gemma 4", markers=(_BEGIN, _END, _QUOTE), present=(r"<\|tool_call>call:",))
