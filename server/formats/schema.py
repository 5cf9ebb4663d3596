"""Prepares JSON schemas for `llguidance`: checks them, closes objects, fixes the white space."""

import json
from collections.abc import Collection, Iterator
from typing import Any

MAX_DEPTH = 64
"""Most levels of a schema, because it is read by recursion."""

MAX_VALUES = 2**16
"""Most values of a schema; a larger one would not be compiled."""

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is written as templates and Python write it, with one space after colons and commas. A model that may choose its
white space may never stop writing it."""

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SINGLE = frozenset({"items", "additionalProperties", "contains"})
_BRANCHES = frozenset({"anyOf", "oneOf", "prefixItems"})
_OPEN = _BRANCHES | {"additionalProperties", "patternProperties", "$ref", "if", "unevaluatedProperties"}
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_REAL_DAY = f"^(?:{_YEAR}-(?:02-(?:[01].|2[0-8])|(?:0[13-9]|1[0-2])-..)|{_LEAP_YEAR}-02-29)"
"""Added to the format, which knows the lengths of months: no year 0, and 29 February in leap years only."""
_KINDS: dict[str, tuple[type, ...]] = {
    "type": (str, list),
    "enum": (list,),
    "required": (list,),
    "$ref": (str,),
    **dict.fromkeys(_NAMED, (dict,)),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), (list,)),
}
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})


class SchemaError(ValueError):
    """A schema that cannot be enforced. The message is fit for the client; the caller adds the name of the field."""


def guided_schema(schema: dict[str, Any], *, is_lenient: bool = False) -> dict[str, Any]:
    """Add to a schema what `llguidance` needs, and remove annotations.

    Where an object declares `properties`, `additionalProperties` defaults to false: else a model may never stop adding
    members.

    Args:
        is_lenient: Ignore what cannot be enforced, instead of refusing the schema.

    Raises:
        SchemaError: It is nested too deeply or too large, or it is not a schema.
    """
    _check_size(schema)
    # Schemas that apply together would exclude each other if each was closed.
    may_close = not any("allOf" in part or {"$ref", "properties"} <= part.keys() for part in _objects(schema))
    style = JSON_STYLE | ({"lenient": True} if is_lenient else {})
    return {**_guided(schema, may_close), "x-guidance": style}


def _check_size(value: object) -> None:
    level: list[object] = [value]
    num_values = 0
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        num_values += len(level)
        if num_values > MAX_VALUES:
            raise SchemaError(f"a schema must hold at most {MAX_VALUES} values, got more")
    if level:
        raise SchemaError(f"a schema must be at most {MAX_DEPTH} levels deep")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in _inner(value):
        yield from _objects(inner)


def _inner(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _guided(schema: Any, may_close: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    _check(schema)
    members = schema.get("properties")
    guided = {
        key: _guided_part(key, value, may_close, has_members=members is not None)
        for key, value in schema.items()
        if key not in _ANNOTATIONS
    }
    if schema.get("format") in ("date", "date-time"):
        guided.setdefault("pattern", _REAL_DAY)
    declares_all = members is not None and all(name in members for name in schema.get("required", ()))
    if may_close and declares_all and not _OPEN & schema.keys():
        guided["additionalProperties"] = False
    return guided


def _check(schema: dict[str, Any]) -> None:
    """Check what this file relies on; the library checks the rest."""
    for key, kinds in _KINDS.items():
        if key in schema and not isinstance(schema[key], kinds):
            raise SchemaError(f"{key} cannot be {json.dumps(schema[key])[:80]}")
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise SchemaError("required must hold names")


def _guided_part(key: str, value: Any, may_close: bool, *, has_members: bool) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: _guided(part, may_close) for name, part in value.items()}
    if key in _SINGLE:
        return _guided(value, may_close)
    if key in _BRANCHES and isinstance(value, list):
        return [_guided(part, may_close and not has_members) for part in value]
    return value
