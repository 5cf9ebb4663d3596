"""Values that a model writes as raw text between tags: the tool's schema says of which JSON type they are."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from weft.server.formats.scanner import json_text

_IS_OF_TYPE: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),  # the last, since any text fits it
}
_MAX_REFERENCES = 32  # one behind the other; more is a circle


def resolve(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Follow `$ref` into `root` until there is none; {} where it leads nowhere, or the schema is a boolean."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema if isinstance(schema, dict) else {}
        target: Any = root
        for step in schema["$ref"].removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, dict) else None
        schema = target
    return {}


def with_definitions(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """The schema as a root of its own, in which `$ref` still reaches the definitions of `root`."""
    return {**schema, **{key: value for key, value in root.items() if key in ("$defs", "definitions")}}


def types_of(schema: Any, root: dict[str, Any], depth: int = 0) -> list[str]:
    """The JSON types that a schema names, in its order; none: any. `root` is the schema that `$ref` points into."""
    schema = resolve(schema, root)
    if (named := schema.get("type")) is not None:
        return [name for name in ([named] if isinstance(named, str) else named) if name in _IS_OF_TYPE]
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return [name for name, fits in _IS_OF_TYPE.items() if any(fits(value) for value in values)]
    if depth == _MAX_REFERENCES:
        return []
    for key in ("anyOf", "oneOf", "allOf"):
        members = [types_of(member, root, depth + 1) for member in schema.get(key, ())]
        if key != "allOf" and not all(members):
            continue
        if members:
            return list(dict.fromkeys(name for names in members for name in names))
    return ["object"] if "properties" in schema else ["array"] if "items" in schema else []


def raw_to_json(text: str, types: Sequence[str]) -> str:
    """Write a whole raw value as JSON of the first of `types` that it fits, else as a string.

    Where the schema names no type, JSON is taken as JSON, since templates write everything but strings so. `True`,
    `False` and `None` are taken for their JSON, since some templates write those.
    """
    word = text.strip()
    try:
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(word, word))
        written = json_text(value)
    except (ValueError, RecursionError):
        return json_text(text)
    if not types:
        return written
    fitting = next((name for name in types if name == "string" or _IS_OF_TYPE[name](value)), "string")
    return json_text(text) if fitting == "string" else written
