"""Reads tools and formats of an answer in any API's form, which agents and frameworks send to all of them.

    {"type": "function", "function": {"name", "parameters"}}      OpenAI's chat; often without the type
    {"type": "function", "name", "parameters"}                    the Responses API
    {"name", "input_schema"}                                      Anthropic; MCP has inputSchema
    {"type": "custom", "custom": {"name", "format"}}              a custom tool, which may be flat as well
    {"type": "web_search"}, {"google_search": {}}                 hosted by another server

    {"type": "json_schema", "json_schema": {"name", "schema"}}    OpenAI's chat; often without name or wrapper
    {"type": "json_schema", "name", "schema"}                     the Responses API
    {"type": "json_object", "schema"}, {"type": "json", "value"}  llama.cpp; TGI
    {"type": "object", "properties"}                              the schema itself

No schema of a tool (null, "", []) is that of one without arguments.
"""

from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from weft.server.errors import UnsupportedValueError, shown

_SCHEMA_NAMES = ("parameters", "input_schema", "inputSchema")
_MEMBERS = ("name", "description", "strict", "format")


class ToolForm(NamedTuple):
    """A tool in no API's form.

    Attributes:
        kind: function or custom; that of another tool is its type, or the member that says what it is.
        inner: `name`, `description`, `strict`, and `parameters` or `format`.
        outer: The other members.
    """

    kind: str
    inner: dict[str, Any]
    outer: dict[str, Any]

    @property
    def is_called(self) -> bool:
        """Whether the client runs it."""
        return self.kind in ("function", "custom")

    @property
    def nested(self) -> dict[str, Any]:
        """As OpenAI's chat declares it."""
        if not self.inner:
            return {**self.outer, "type": self.kind}
        inner = dict(self.inner)
        match inner.get("format"):
            case {"type": "grammar", "syntax": syntax, "definition": definition}:
                inner["format"] = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
        return {**self.outer, "type": self.kind, self.kind: inner}

    @property
    def flat(self) -> dict[str, Any]:
        """As the Responses API declares it."""
        inner = dict(self.inner)
        match inner.get("format"):
            case {"type": "grammar", "grammar": dict() as grammar}:
                inner["format"] = {"type": "grammar", **grammar}
        return {**self.outer, **inner, "type": self.kind}


def tool_form(tool: dict[str, Any]) -> ToolForm:
    """Read a declaration."""
    kind = tool.get("type")
    kind = kind.strip().lower() if isinstance(kind, str) else ""
    nested = next((key for key in ("function", "custom") if isinstance(tool.get(key), dict)), "")
    is_schema = any(key in tool for key in _SCHEMA_NAMES)
    if nested and kind in ("", nested, "tool"):
        inner = dict(tool[nested])
        outer = {key: value for key, value in tool.items() if key not in ("type", nested)}
        return ToolForm(nested, with_schema(inner), outer)
    if kind == "function" or (kind in ("", "custom", "tool") and is_schema) or (not kind and "name" in tool):
        kind = "function"
    elif kind != "custom":
        return ToolForm(str(tool.get("type") or next(iter(tool), "")), {}, {})
    names = (*_MEMBERS, *_SCHEMA_NAMES)
    inner = {key: value for key, value in tool.items() if key in names}
    return ToolForm(kind, with_schema(inner), {key: tool[key] for key in tool if key not in (*names, "type")})


def with_schema(inner: dict[str, Any]) -> dict[str, Any]:
    """The members of a function with the schema, if there is one, as `parameters`."""
    given = next((inner[key] for key in _SCHEMA_NAMES if inner.get(key) is not None), None)
    inner = {key: value for key, value in inner.items() if key not in _SCHEMA_NAMES}
    if isinstance(given, str) and given.lstrip().startswith("{"):
        with suppress(msgspec.DecodeError, RecursionError):  # what is no object is refused where types are checked
            given = msgspec.json.decode(given)
    if isinstance(given, dict) and given.get("required", ()) is None:  # templates take its length
        given = {key: value for key, value in given.items() if key != "required"}
    return inner if given in (None, "", []) else {**inner, "parameters": given}


def unhosted(kind: str, path: str, *, strict: bool) -> str:
    """What is reported of a tool that this server does not host; `path` is where it is declared.

    Raises:
        UnsupportedValueError: Fields that have no effect are refused.
    """
    if strict:
        raise UnsupportedValueError(f"{path}.type: this server does not host {shown(kind)}", param=f"{path}.type")
    return f"{path}.type={kind}"


_SIGNS = frozenset({"type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "items"})
"""An object with one of these is a schema."""
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
FORMAT_KINDS = {"text": "text", "json_object": "json_object", "json": "json_object", "json_schema": "json_schema"}
_ABOUT = ("name", "description", "strict")
_HOLDERS = ("json_schema", "schema", "value")
"""Members that hold a schema, or, with some frameworks, a format once more."""


class FormatForm(NamedTuple):
    """A format in no API's form.

    Attributes:
        kind: text, json_object or json_schema, or what was sent.
        members: `schema`, which may be missing, and what is said about it: `name`, `description`, `strict`.
        at: Where the schema stands in the format that was sent.
        others: The other members.
    """

    kind: Any
    members: dict[str, Any]
    at: str
    others: dict[str, Any]

    @property
    def nested(self) -> dict[str, Any]:
        """As OpenAI's chat has it."""
        return {**self.others, "type": self.kind, **({"json_schema": self.members} if self.members else {})}

    @property
    def flat(self) -> dict[str, Any]:
        """As the Responses API has it, where every schema has a name."""
        name = {"name": self.members.get("name") or "output"} if self.kind == "json_schema" else {}
        return {**self.others, **self.members, **name, "type": self.kind}


def format_form(given: dict[str, Any] | str) -> FormatForm:
    """Read a format."""
    if isinstance(given, str):
        given = {"type": given}
    kind = given.get("type")
    if kind in (None, "json") and (given.get("json_schema") is not None or given.get("schema") is not None):
        kind = "json_schema"
    elif _is_schema(given):
        return FormatForm("json_schema", {"schema": given}, "", {})
    others = {key: value for key, value in given.items() if key not in ("type", *_ABOUT)}
    if not isinstance(kind, str) or kind not in FORMAT_KINDS or kind == "text":
        return FormatForm(given.get("type"), {}, "", {key: value for key, value in given.items() if key != "type"})
    members = {key: given[key] for key in _ABOUT if key in given}
    at, inner = "", given
    while isinstance(inner, dict) and not (at and _is_schema(inner)):
        key = next((key for key in _HOLDERS if inner.get(key) is not None), "")
        value = _parsed(inner.get(key))
        if not key or (key == "json_schema" and not isinstance(value, dict)):
            break
        members |= {name: inner[name] for name in inner if at and name not in ("type", key)}
        at, inner = f"{at}.{key}", value
        others.pop(key, None)
    if at.endswith(".json_schema") and _SIGNS.isdisjoint(inner):
        members |= inner  # it only has a name, or what is not known
    elif at:
        members["schema"] = inner
    elif kind == "json_schema":
        members = {}
    if FORMAT_KINDS[kind] == "json_object" and members.get("schema", {}) == {}:
        return FormatForm("json_object", {}, "", others)
    return FormatForm("json_schema", members, at, others)


def _is_schema(given: dict[str, Any]) -> bool:
    """Whether an object without a type of format is the schema itself."""
    kind = given.get("type")
    names = [kind] if isinstance(kind, str) else kind
    if isinstance(names, list):
        return all(isinstance(name, str) and name in _TYPES for name in names)
    return kind is None and not _SIGNS.isdisjoint(given)


def _parsed(value: Any) -> Any:
    """A schema that was sent as JSON text, or what else was sent."""
    if isinstance(value, str):
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(value)
    return value
