"""JSON types of schemas, and raw text of models as JSON of these types."""

import ast
import json
from collections.abc import Sequence
from types import NoneType
from typing import Any

from weft.server.formats.scanner import json_text

_CLASSES: dict[str, tuple[type, ...]] = {
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
    """Follow `$ref` into `root` to its end; {} if it leads nowhere, or the schema is a boolean."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(schema.get("$ref"), str):
            return schema
        target: Any = root
        for step in schema["$ref"].removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, dict) else None
        schema = target
    return {}


def values_of(schema: dict[str, Any]) -> list[Any] | None:
    """The values that a schema without `$ref` lists as the only ones; None: it lists none."""
    return schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None


def types_of(schema: Any, root: dict[str, Any], depth: int = 0) -> list[str]:
    """The JSON types that a schema names, in its order; empty: any type. `root` is where `$ref` points into."""
    schema = resolve(schema, root)
    if (named := schema.get("type")) is not None:
        return [name for name in ([named] if isinstance(named, str) else named) if name in _CLASSES]
    if (values := values_of(schema)) is not None:
        classes = set(map(type, values))
        return [name for name, fitting in _CLASSES.items() if not classes.isdisjoint(fitting)]
    if depth == _MAX_REFERENCES:
        return []
    for key in ("anyOf", "oneOf", "allOf"):
        members = [types_of(member, root, depth + 1) for member in schema.get(key, ())]
        if members and (key == "allOf" or all(members)):
            return list(dict.fromkeys(name for names in members for name in names))
    return ["object"] if "properties" in schema else ["array"] if "items" in schema else []


def raw_to_json(text: str, types: Sequence[str]) -> str:
    """Write a whole raw value as JSON of the first of `types` that it fits, else as a string.

    Without types, text that is JSON is taken as JSON, because templates write everything but strings so. Literals of
    Python count as their JSON, because some templates write those.
    """
    try:
        value = _value(text.strip())
        written = json_text(value)
    except (ValueError, RecursionError):
        return json_text(text)
    fits = next((name for name in types if name == "string" or type(value) in _CLASSES[name]), "string")
    return json_text(text) if types and fits == "string" else written


def _value(word: str) -> Any:
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(word, word))
    except ValueError:
        if word[:1] not in ("{", "[") or len(word) > _MAX_LITERAL:
            raise
    try:
        # Back from JSON, in which keys are strings and there are no other types.
        return json.loads(json_text(ast.literal_eval(word)))
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError(word) from error
