"""Makes schemas smaller that are too long for a grammar: each step enforces less of them.

Takes schemas from `loosen`. First what is inside members becomes free, then all but the types of members, then
everything. What the result allows includes what the schema allows.
"""

import heapq
import json
from collections.abc import Sequence
from typing import Any

from weft.server.json_schema.keywords import FREE_OBJECT, Schema, types_in

MAX_SCHEMA_BYTES = 96 << 10
"""Most bytes of the schemas of one grammar, which may have 128 KiB with what is around them."""
_BYTES_AROUND = 100
"""About what the grammar has around one schema: where a call begins and ends, whether objects are closed."""

_NESTED = frozenset(
    (
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        *("items", "prefixItems", "anyOf", "oneOf", "allOf", "$ref", "$defs"),
    )
)

_TAKES_NOTHING: Schema = {"type": "object"}
_OTHERS = frozenset(("patternProperties", "anyOf", "oneOf", "allOf", "$ref"))
"""What may allow more members than `properties` has."""


def looser(schema: Schema) -> Schema | None:
    """The schema after the next step; None: everything is free already."""
    free = FREE_OBJECT if types_in(schema) == ["object"] or "properties" in schema else {}
    for step in (_without_nested(schema), _types_only(schema)):
        if _size(step) < _size(schema):
            return step
    return None if schema in (free, _TAKES_NOTHING, {}) else free


def fitted(schemas: Sequence[Schema], may_loosen: Sequence[bool], most: int = MAX_SCHEMA_BYTES) -> list[Schema]:
    """The schemas, the longest loosened step by step until they have at most so many bytes, or all are free."""
    made = list(schemas)
    sizes = [_size(schema) + _BYTES_AROUND for schema in schemas]
    total = sum(sizes)
    longest = [(-size, i) for i, size in enumerate(sizes) if may_loosen[i]] if total > most else []
    heapq.heapify(longest)
    while total > most and longest:
        size, i = heapq.heappop(longest)
        if (step := looser(made[i])) is not None:
            made[i] = step
            new = _size(step) + _BYTES_AROUND
            total += size + new  # the size in the heap is negative
            heapq.heappush(longest, (-new, i))
    return made


def _size(schema: Any) -> int:
    return len(json.dumps(schema))


def _without_nested(schema: Schema) -> Schema:
    """The schema with what its members and items hold inside them left free."""
    kept = ("required", "minProperties", "maxProperties")
    out = {key: value for key, value in schema.items() if key in kept or key not in _NESTED}
    if "additionalProperties" in schema or not _OTHERS.isdisjoint(schema):
        out["additionalProperties"] = schema.get("additionalProperties") is not False or not _OTHERS.isdisjoint(schema)
    if isinstance(schema.get("properties"), dict):
        out["properties"] = {name: _flat(part) for name, part in schema["properties"].items()}
    if "items" in schema and "prefixItems" not in schema:
        out["items"] = _flat(schema["items"])
    return out


def _flat(part: Any) -> Any:
    return {key: value for key, value in part.items() if key not in _NESTED} if isinstance(part, dict) else part


def _types_only(schema: Schema) -> Schema:
    """The types of the schema and of its members, and which members there must be."""
    out: Schema = {key: schema[key] for key in ("type", "required") if key in schema}
    if isinstance(schema.get("properties"), dict):
        out["properties"] = {name: _type(part) for name, part in schema["properties"].items()}
    if schema.get("additionalProperties", "properties" not in schema) is not False and types_in(out) == ["object"]:
        out["additionalProperties"] = True
    return out


def _type(part: Any) -> Any:
    return {key: part[key] for key in ("type",) if key in part} if isinstance(part, dict) else part
