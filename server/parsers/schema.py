"""JSON schemas as outputs are held to them."""

import json
from typing import Any

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SINGLE = frozenset({"items", "additionalProperties", "contains"})
_BRANCHES = frozenset({"anyOf", "oneOf", "prefixItems"})
_OPEN = _BRANCHES | {"additionalProperties", "patternProperties", "$ref", "if", "unevaluatedProperties"}

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_REAL_DAY = f"^(?:{_YEAR}-(?:02-(?:[01].|2[0-8])|(?:0[13-9]|1[0-2])-..)|{_LEAP_YEAR}-02-29)"
"""Besides the format, which knows how long a month is: no year 0, no 29 February but in leap years."""


def guided_schema(
    schema: dict[str, Any], *, item_separator: str = ", ", key_separator: str = ": ", is_lenient: bool = False
) -> dict[str, Any]:
    """A schema with what `llguidance` is to know besides.

    JSON is written as templates and Python write it, with one space after colons and commas: a model that may choose
    its white space may also never stop to write it. For the same reason an object that declares members, and does not
    say whether it may have others, has none but these.

    Args:
        schema: As it was given.
        item_separator: A regex, between values.
        key_separator: A regex, between a key and its value.
        is_lenient: Leave out what cannot be enforced, instead of refusing the schema.

    Raises:
        RecursionError: It is nested too deeply.
    """
    style = {"whitespace_flexible": False, "item_separator": item_separator, "key_separator": key_separator}
    # Parts of allOf hold together: closed one by one, they would exclude each other.
    closed = schema if '"allOf"' in json.dumps(schema) else _closed(schema)
    return {**closed, "x-guidance": style | ({"lenient": True} if is_lenient else {})}


def _closed(schema: Any, *, may_close: bool = True) -> Any:
    if not isinstance(schema, dict):
        return schema
    has_members = "properties" in schema
    closed = {key: _closed_part(key, value, has_members) for key, value in schema.items()}
    if schema.get("format") in ("date", "date-time"):
        closed.setdefault("pattern", _REAL_DAY)
    if may_close and has_members and not _OPEN & schema.keys():
        closed["additionalProperties"] = False
    return closed


def _closed_part(key: str, value: Any, has_members: bool) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: _closed(part) for name, part in value.items()}
    if key in _SINGLE:
        return _closed(value)
    if key in _BRANCHES and isinstance(value, list):
        return [_closed(part, may_close=not has_members) for part in value]
    return value
