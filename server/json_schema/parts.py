"""Takes a schema apart: which parts it has, and what is left of it if some of them are freed.

A part is a keyword, or a schema inside one. Its path holds the keys and indices from the root on. Takes schemas from
`loosen`; what a result allows includes what the schema allows.
"""

from collections.abc import Collection
from typing import Any

from weft.server.json_schema.keywords import Schema

Path = tuple[str | int, ...]

_NAMED = ("patternProperties", "properties", "$defs")
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
"""Keywords that hold a list of schemas."""
_LAST = ("additionalProperties", "patternProperties", "items", "properties", "prefixItems", "anyOf", "oneOf", "allOf",
         "$ref", "$defs")  # fmt: skip
"""These come after what bounds a value by itself, each before those that rely on it. So what is found to contradict the
parts before it is deep inside, and no bound is given up for it."""


def inner_parts(schema: Schema, at: Path) -> list[Path]:
    """The parts one step below a part, or of the schema itself (an empty path), in an order in which they are added."""
    value: Any = schema
    for step in at:
        value = value[step]
    if isinstance(value, dict) and _is_schema(at):
        return [(*at, key) for key in sorted(value, key=lambda key: _LAST.index(key) if key in _LAST else -1)]
    if isinstance(value, dict | list) and at[-1] in (*_NAMED, *LISTS):
        return [(*at, step) for step in (value if isinstance(value, dict) else range(len(value)))]
    return []


def _is_schema(at: Path) -> bool:
    """Whether at a path there is a schema; if not, it is a keyword that holds several, or a value."""
    is_schema = True
    for step in at:
        is_schema = not is_schema or step in ("additionalProperties", "items")
    return is_schema


def freed(schema: Any, parts: Collection[Path], at: Path = ()) -> Any:
    """The schema without some of its parts. Members stay, and may then be anything."""
    if at and at in parts:
        return {}
    if not isinstance(schema, dict):
        return schema
    out: Schema = {}
    for key, value in schema.items():
        path = (*at, key)
        if key in _NAMED and isinstance(value, dict):
            is_free = path in parts
            if not (is_free and key == "patternProperties"):
                out[key] = {name: {} if is_free else freed(part, parts, (*path, name)) for name, part in value.items()}
        elif path in parts:
            continue
        elif key in LISTS and isinstance(value, list):
            out[key] = [freed(part, parts, (*path, i)) for i, part in enumerate(value)]
        else:
            out[key] = freed(value, parts, path) if key in ("additionalProperties", "items") else value
    opening = [key for key in ("additionalProperties", "patternProperties") if (*at, key) in parts]
    if opening or ((*at, "properties") in parts and "additionalProperties" not in out):
        out["additionalProperties"] = True
    return out


def written(schema: Schema, at: Path) -> str:
    """A path as it is reported: `.properties.x.anyOf[1]`. That of a definition begins where the caller has it."""
    text = ""
    if at[:1] == ("$defs",) and len(at) > 1:
        definition = schema["$defs"][at[1]]
        text = definition.get("$comment", "") if isinstance(definition, dict) else ""
        at = at[2:]
    return text + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at)
