"""Reads the spellings of strangers: what means exactly the same as a usual form of JSON Schema becomes that form.

Serialisers of other languages write `[]` for an empty object, "true" for true and a list of one without its brackets.
What is odd but has no one meaning stays as it is.
"""

from collections.abc import Callable
from typing import Any

from weft.server.json_schema.keywords import Schema
from weft.server.json_schema.patterns import portable

_TRUTHS = {"true": True, "false": False}
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_SIGNS = frozenset({"type", "$ref", "enum", "const", "properties", "items", "anyOf", "oneOf", "allOf", "required"})
"""An object with one of these is a schema."""
_ABSENT: Any = object()


def usual(schema: Schema) -> Schema:
    """The schema in usual spellings; the schemas inside it stay as they are."""
    changed = {key: read(value) for key, value in schema.items() if (read := _READERS.get(key)) is not None}
    odd = {key: value for key, value in changed.items() if value is not schema[key]}
    if odd:
        schema = {key: value for key, value in {**schema, **odd}.items() if value is not _ABSENT}
    return _with_names(schema) if "propertyNames" in schema else schema


def _truth(value: Any) -> Any:
    return _TRUTHS.get(value.strip().lower(), value) if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, dict) and not _SIGNS.isdisjoint(value) else value


def _values(value: Any) -> Any:
    return [value] if isinstance(value, str | int | float) else value


def _named(value: Any) -> Any:
    return {} if value == [] else value


def _names(value: Any) -> Any:
    return [] if value == {} else _truth(value)


def _types(value: Any) -> Any:
    if isinstance(value, list) and None in value:
        return ["null" if name is None else name for name in value]
    return _filled(value)


def _filled(value: Any) -> Any:
    return _ABSENT if value == "" else value


def _bound(value: Any) -> Any:
    return _filled(_truth(value))


def _format(value: Any) -> Any:
    return value.lower() if isinstance(value, str) and not value.islower() else value


_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "nullable", "uniqueItems"), _truth),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), _listed),
    **dict.fromkeys(("properties", "patternProperties", "dependencies", "dependentRequired"), _named),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _bound),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _filled),
    "enum": _values,
    "required": _names,
    "type": _types,
    "format": _format,
}


def _with_names(schema: Schema) -> Schema:
    """The schema without `propertyNames`, if that asks for nothing, or for what other keywords say as well."""
    names = schema["propertyNames"]
    asked = (
        {key: value for key, value in names.items() if key not in _ANNOTATIONS} if isinstance(names, dict) else names
    )
    others = {key: value for key, value in schema.items() if key != "propertyNames"}
    if isinstance(asked, dict) and str(asked.get("type", "string")).lower() == "string":
        asked.pop("type", None)
        asked = {key: value for key, value in asked.items() if value is not None and (key, value) != ("minLength", 0)}
    if asked is True or asked == {}:
        return others
    is_map = schema.get("type", "object") == "object" and schema.keys().isdisjoint(("properties", "patternProperties"))
    if not isinstance(asked, dict) or not is_map:
        return schema
    value = schema.get("additionalProperties")
    if asked.keys() == {"pattern"} and isinstance(asked["pattern"], str) and portable(asked["pattern"]) is not None:
        return {**others, "patternProperties": {asked["pattern"]: value}, "additionalProperties": False}
    if asked.keys() == {"enum"} and isinstance(asked["enum"], list) and all(isinstance(x, str) for x in asked["enum"]):
        return {**others, "properties": dict.fromkeys(asked["enum"], value), "additionalProperties": False}
    return schema
