"""Writes Lark for `llguidance`, and prepares JSON schemas for it.

A grammar has literals, free text that cannot hide a marker, and JSON of a schema. This relies on three facts. A string
literal is read as JSON. A control token matches no text; a rule has to name it. A lexeme ends where no longer match is
left, so free text and a literal after it must be one lazy lexeme, while free text and a token may be two.
"""

import json
import re
from collections.abc import Sequence
from types import NoneType
from typing import Any

from weft.server.formats.parser import Mark, Tool
from weft.server.json_schema.exclusive import is_closed, may_close

INDEX = "\0"
"""Stands in texts of formats for the number of the call."""

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
"""JSON is written as templates and Python write it, so that constrained output looks like theirs: with
one space after colons and commas. A model that may choose its white space may never stop writing it."""

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SINGLE = frozenset({"items", "additionalProperties", "contains"})
_BRANCHES = frozenset({"anyOf", "oneOf", "prefixItems"})
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_REAL_DAY = f"^(?:{_YEAR}-(?:02-(?:[01].|2[0-8])|(?:0[13-9]|1[0-2])-..)|{_LEAP_YEAR}-02-29)"
"""Added to the format, which knows the lengths of months: no year 0, and 29 February in leap years only."""


def guided_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Add to a schema what `llguidance` needs, and remove annotations.

    Where an object declares `properties`, `additionalProperties` defaults to false: else a model may never stop adding
    members.

    Args:
        schema: What `loosen` left of one, whose depth is bounded. Branches of `oneOf` need not exclude each other.
    """
    return {**_guided(schema, may_close(schema)), "x-guidance": JSON_STYLE}


def _guided(schema: Any, closes: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    members = schema.get("properties")
    guided = {
        key: _guided_part(key, value, closes, has_members=members is not None)
        for key, value in schema.items()
        if key != "$comment"
    }
    if schema.get("format") in ("date", "date-time"):
        guided.setdefault("pattern", _REAL_DAY)
    if closes and is_closed(schema):
        guided["additionalProperties"] = False
    return guided


def _guided_part(key: str, value: Any, closes: bool, *, has_members: bool) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: _guided(part, closes) for name, part in value.items()}
    if key in _SINGLE:
        return _guided(value, closes)
    if key in _BRANCHES and isinstance(value, list):
        return [_guided(part, closes and not has_members) for part in value]
    return value


ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
"""The name of an argument of a tool that declares none and takes any."""
_ANY_TEXT = "/(?s:.*)/"
_LARK_ANNOTATIONS = {"type", "title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs"}


def literal(text: str) -> str:
    """Exactly this text, which must not be empty; matches no control token."""
    return json.dumps(text)


def json_lexemes(text: str) -> str:
    """Exactly this beginning of JSON, in the lexemes of `json_value`, so that both may stand at the same place."""
    return " ".join(map(literal, re.findall(r'"[^"]*"|[^"]+', text)))


def spell(text: str, markers: Sequence[str], mark: Mark) -> str:
    """Exactly this text, with its markers as `mark` writes them."""
    for marker in sorted(markers, key=len, reverse=True):
        before, found, after = text.partition(marker)
        if found:
            parts = spell(before, markers, mark), mark(marker), spell(after, markers, mark)
            return " ".join(part for part in parts if part)
    return literal(text) if text else ""


def regex(pattern: str) -> str:
    r"""A regex as Lark writes it; a slash would end it, so one that is not escaped becomes \/."""
    parts = pattern.split("\\\\")  # what follows an escaped backslash is not escaped itself
    escaped = "\\\\".join(part.replace("\\/", "/").replace("/", "\\/") for part in parts)
    return f"/{escaped}/".replace("\n", "\\n")


def string_of(schema: dict[str, Any]) -> str | None:
    """The terminal expression for `pattern`, `minLength` and `maxLength` of a JSON schema; None: any string fits."""
    parts = []
    if isinstance(pattern := schema.get("pattern"), str):
        has_end = pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern.removeprefix("^")[: -1 if has_end else None]
        head, tail = ("" if pattern.startswith("^") else "(?s:.*)"), ("" if has_end else "(?s:.*)")
        parts.append(regex(f"{head}(?:{inner}){tail}"))
    if "minLength" in schema or "maxLength" in schema:
        parts.append(f"/(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    return " & ".join(parts) or None


def text_without(texts: Sequence[str], not_first: str = "", within: str | None = None) -> str:
    """The terminal expression for any text, also an empty one, in which none of `texts` occurs.

    Args:
        texts: No text is empty.
        not_first: The text does not begin with this, nor with white space and this; "" forbids nothing.
        within: A terminal expression that the text must match as well.
    """
    parts = [_ANY_TEXT, within] if within else [_ANY_TEXT]
    if texts:
        parts.append(f"~({_ANY_TEXT} ({' | '.join(map(literal, texts))}) {_ANY_TEXT})")
    if not_first:
        parts.append(f"~(/[ \\t\\r\\n]*/ {literal(not_first)} {_ANY_TEXT})")
    return " & ".join(parts)


def text_up_to(
    rule: str, marker: str, mark: Mark, without: Sequence[str] = (), not_first: str = "", within: str | None = None
) -> str:
    """Define a rule and its terminal: any text up to the first `marker`, and that marker.

    A marker that is spelled with other tokens than its own ends the text as well, or is refused.

    Args:
        rule: The rule's name, in lower case; the terminal is the name in upper case and `_TEXT`.
        marker: What ends the text.
        without: More texts that must not occur, such as other markers.
        not_first, within: As in `text_without`.

    Returns:
        Two lines.
    """
    marked = mark(marker)
    lazy = "[lazy]" if marked.startswith('"') else ""
    text = f"{rule.upper()}_TEXT"
    expression = text_without(tuple(dict.fromkeys((marker, *without))), not_first, within)
    return f"{rule}{lazy}: {text} {marked}\n{text}: {expression}\n"


def json_value(schema: dict[str, Any]) -> str:
    """A JSON value of the schema, whose `$ref` point into the schema itself; see `guided_schema`."""
    return f"%json {json.dumps(guided_schema(schema))}"


def member_value(schema: Any, tool: Tool) -> str:
    """A JSON value of a schema inside the tool's, in which `$ref` still reaches the definitions of the tool's."""
    definitions = {"$defs": tool.parameters["$defs"]} if "$defs" in tool.parameters else {}
    return json_value({**(schema if isinstance(schema, dict) else {}), **definitions})


def arguments(tool: Tool) -> str:
    """The JSON object of a tool's arguments; exactly `{}` if the tool's schema declares none."""
    if not any(value for key, value in tool.parameters.items() if key not in _LARK_ANNOTATIONS):
        return literal("{}")
    return json_value({**tool.parameters, "type": "object"})


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (NoneType,),
    "object": (dict,),
    "array": (list,),
    "string": (str,),
}
_MAX_LITERAL = 2**16  # characters; Python's parser takes memory and stack
_MAX_REFERENCES = 32  # in a row; more is a circle


def resolve(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Follow `$ref` into the definitions of `root` to its end; {} for a boolean."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(schema.get("$ref"), str):
            return schema
        schema = root.get("$defs", {}).get(schema["$ref"].removeprefix("#/$defs/"))
    return {}


def values_of(schema: dict[str, Any]) -> list[Any] | None:
    """The values that a schema without `$ref` lists as the only ones; None: it lists none."""
    return schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None


def types_of(schema: Any, root: dict[str, Any], depth: int = 0) -> list[str]:
    """The JSON types that a schema names, in its order; empty: any type. `root` is where `$ref` points into."""
    schema = resolve(schema, root)
    if (named := schema.get("type")) is not None:
        return [name for name in ([named] if isinstance(named, str) else named) if name in _PYTHON_TYPES]
    if (values := values_of(schema)) is not None:
        classes = set(map(type, values))
        return [name for name, fitting in _PYTHON_TYPES.items() if not classes.isdisjoint(fitting)]
    if depth == _MAX_REFERENCES:
        return []
    for key in ("anyOf", "oneOf", "allOf"):
        members = [types_of(member, root, depth + 1) for member in schema.get(key, ())]
        if members and (key == "allOf" or all(members)):
            return list(dict.fromkeys(name for names in members for name in names))
    return ["object"] if "properties" in schema else ["array"] if "items" in schema else []


def of_types(schema: Any, names: Sequence[str], root: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of those values of a schema that have one of these JSON types; None: it has no such values."""
    schema = resolve(schema, root)
    if (values := values_of(schema)) is not None:
        classes = tuple(kind for name in names for kind in _PYTHON_TYPES[name])
        kept = [value for value in values if type(value) in classes]
        return {"enum": kept} if kept else None
    for key in ("anyOf", "oneOf"):
        if key in schema and "type" not in schema:
            parts = [of_types(member, names, root) for member in schema[key]]
            fitting = [part for part in parts if part is not None]
            return {**schema, key: fitting} if fitting else None
    types = [name for name in types_of(schema, root) or _PYTHON_TYPES if name in names]
    return {**schema, "type": types if len(types) > 1 else types[0]} if types else None
