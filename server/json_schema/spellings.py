"""Reads the spellings of strangers: what means exactly the same as a usual form of JSON Schema becomes that form.

Serialisers of other languages write `[]` for an empty object, "true" for true and a list of one without its brackets.
What is odd but has no one meaning stays as it is.
"""

from typing import Any

from weft.server.json_schema.keywords import Schema
from weft.server.json_schema.patterns import portable

_TRUTHS = {"true": True, "false": False}
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_SIGNS = frozenset({"type", "$ref", "enum", "const", "properties", "items", "anyOf", "oneOf", "allOf", "required"})
"""An object with one of these is a schema."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_TRUE_OR_ELSE = ("additionalProperties", "unevaluatedProperties", "nullable", "uniqueItems", "required", *_BOUNDS)
_EMPTY = (*_BOUNDS, *_SIZES, "type")
_NAMED = ("properties", "patternProperties", "dependencies", "dependentRequired")
_ABSENT: Any = object()


def usual(schema: Schema) -> Schema:
    """The schema in usual spellings; the schemas inside it stay as they are."""
    odd = {key: usual for key, value in schema.items() if (usual := _usual(key, value)) is not value}
    if odd:
        schema = {key: value for key, value in {**schema, **odd}.items() if value is not _ABSENT}
    return _with_names(schema) if "propertyNames" in schema else schema


def _usual(key: str, value: Any) -> Any:
    """The usual form of a keyword's value."""
    if key == "enum" and isinstance(value, str | int | float):
        return [value]
    if isinstance(value, str):
        if key in _TRUE_OR_ELSE:
            value = _TRUTHS.get(value.strip().lower(), value)
        if value == "" and key in _EMPTY:
            return _ABSENT
        return value.lower() if key == "format" and not value.islower() else value
    if key in ("anyOf", "oneOf", "allOf") and isinstance(value, dict) and not _SIGNS.isdisjoint(value):
        return [value]
    if value == [] and key in _NAMED:
        return {}
    if value == {} and key == "required":
        return []
    if key == "type" and isinstance(value, list) and None in value:
        return ["null" if name is None else name for name in value]
    return value


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
