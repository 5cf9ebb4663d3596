"""Reads how an answer shall be formatted in any API's form, as clients send it to all of them.

{"type": "json_schema", "json_schema": {"name", "schema"}}    OpenAI's chat; often without name or wrapper
{"type": "json_schema", "name", "schema"}                     the Responses API
{"type": "json_object", "schema"}                             llama.cpp and others
{"type": "json", "value"}                                     TGI
{"type": "object", "properties"}                              the schema itself
"""

from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

_SIGNS = frozenset({"type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "items"})
"""An object with one of these is a schema."""
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_KINDS = {"text": "text", "json_object": "json_object", "json": "json_object", "json_schema": "json_schema"}
_ABOUT = ("name", "description", "strict")


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
    kind, wrapper = given.get("type"), _parsed(given.get("json_schema"))
    has_schema = wrapper is not None or given.get("schema") is not None
    if has_schema and (kind is None or kind == "json"):
        kind = "json_schema"
    elif _is_schema(given):
        return FormatForm("json_schema", {"schema": given}, "", {})
    if not isinstance(kind, str) or kind not in _KINDS or kind == "text" or not isinstance(wrapper, dict | None):
        return _as_sent(given)
    holder, at = (given, "") if wrapper is None else (wrapper, ".json_schema")
    members = {key: holder[key] for key in _ABOUT if key in holder}
    key = next((key for key in ("schema", "value") if holder.get(key) is not None), "")
    if key:
        members["schema"], at = _parsed(holder[key]), f"{at}.{key}"
    elif wrapper is not None and _SIGNS & wrapper.keys():
        members["schema"] = wrapper
    elif wrapper is None or kind != "json_schema":
        return FormatForm(_KINDS[kind], {}, "", {key: given[key] for key in given if key not in ("type", *_ABOUT)})
    if _KINDS[kind] == "json_object" and members["schema"] == {}:
        return FormatForm("json_object", {}, "", {})
    used = ("type", "json_schema", *(("schema", "value", *_ABOUT) if wrapper is None else ()))
    return FormatForm("json_schema", members, at, {key: given[key] for key in given if key not in used})


def _is_schema(given: dict[str, Any]) -> bool:
    """Whether an object without a type of format is the schema itself."""
    kind = given.get("type")
    names = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else None
    return names <= _TYPES if names is not None else kind is None and not _SIGNS.isdisjoint(given)


def _as_sent(given: dict[str, Any]) -> FormatForm:
    return FormatForm(given.get("type"), {}, "", {key: value for key, value in given.items() if key != "type"})


def _parsed(value: Any) -> Any:
    """A schema that was sent as JSON text, or what else was sent."""
    if isinstance(value, str):
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(value)
    return value
