"""Reads one declaration of a tool in any API's form, which agents send to all of them.

    {"type": "function", "function": {"name", "parameters"}}    OpenAI's chat; often without the type
    {"type": "function", "name", "parameters"}                  the Responses API
    {"name", "input_schema"}                                    Anthropic; MCP has inputSchema
    {"type": "custom", "custom": {"name", "format"}}            a custom tool, which may be flat as well
    {"type": "web_search"}, {"google_search": {}}               hosted by another server

No schema (null, "", []) is that of a tool without arguments.
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
        return ToolForm(nested, _with_schema(inner), outer)
    if kind == "function" or (kind in ("", "custom", "tool") and is_schema) or (not kind and "name" in tool):
        kind = "function"
    elif kind != "custom":
        return ToolForm(str(tool.get("type") or next(iter(tool), "")), {}, {})
    names = (*_MEMBERS, *_SCHEMA_NAMES)
    inner = {key: value for key, value in tool.items() if key in names}
    return ToolForm(kind, _with_schema(inner), {key: tool[key] for key in tool if key not in (*names, "type")})


def _with_schema(inner: dict[str, Any]) -> dict[str, Any]:
    """The members with the schema, if there is one, as `parameters`."""
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
