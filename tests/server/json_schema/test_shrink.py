import json
from typing import Any

import pytest

from weft.server.json_schema.keywords import FREE_OBJECT as FREE
from weft.server.json_schema.shrink import fitted, looser

TEXT = {"type": "string", "maxLength": 9}
DEEP = {"type": "object", "properties": {"y": TEXT, "z": {"type": "null"}}, "required": ["y"]}


def steps(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    while (step := looser(schema)) is not None:
        found.append(schema := step)
    return found


def test_first_what_is_inside_members_then_all_but_their_types_then_everything() -> None:
    schema = {"type": "object", "properties": {"a": DEEP, "b": TEXT, "c": True}, "required": ["a"]}
    types = {"a": {"type": "object"}, "b": {"type": "string"}, "c": True}
    assert steps(schema) == [
        {"type": "object", "properties": {**types, "b": TEXT}, "required": ["a"]},
        {"type": "object", "properties": types, "required": ["a"]},
        FREE,
    ]


@pytest.mark.parametrize(
    ("schema", "first"),
    [
        # what more members may come from is gone, so they are allowed
        ({"properties": {"a": TEXT}, "anyOf": [{"required": ["b"]}]}, {"properties": {"a": TEXT}}),
        ({"properties": {"a": TEXT}, "$ref": "#/$defs/0", "$defs": {"0": {}}}, {"properties": {"a": TEXT}}),
        ({"properties": {"a": TEXT}, "patternProperties": {"^longer than true": TEXT}}, {"properties": {"a": TEXT}}),
        ({"properties": {"a": TEXT}, "additionalProperties": DEEP}, {"properties": {"a": TEXT}}),
    ],
)
def test_members_that_were_allowed_are_still(schema: dict[str, Any], first: dict[str, Any]) -> None:
    assert looser(schema) == {**first, "additionalProperties": True}


def test_other_schemas_than_objects() -> None:
    assert steps({"type": "array", "items": DEEP, "minItems": 1}) == [
        {"type": "array", "items": {"type": "object"}, "minItems": 1},
        {"type": "array"},
        {},
    ]
    assert steps({"enum": ["a", "b"]}) == [{}]
    assert steps({}) == steps(FREE) == steps({"type": "object"}) == []


def test_the_longest_is_loosened_first_and_only_as_far_as_needed() -> None:
    long = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"enum": ["x" * 5000]}}}}}
    short = {"type": "object", "properties": {"a": DEEP}}
    made = fitted([short, long, short], [True] * 3, 1000)
    assert made == [short, {"type": "object", "properties": {"a": {"type": "object"}}}, short]
    assert made[0] is short
    assert fitted([long, short], [True] * 2, 10_000) == [long, short]


def test_an_enumeration_of_the_root_is_given_up_when_it_does_not_fit() -> None:
    long = {"type": "object", "properties": {"a": {"type": "string", "enum": [f"value {i}" for i in range(6000)]}}}
    assert fitted([long], [True], 50_000) == [{"type": "object", "properties": {"a": {"type": "string"}}}]


def test_a_strict_schema_is_never_loosened() -> None:
    long = {"type": "object", "properties": {"a": {"enum": ["x" * 5000]}}}
    assert fitted([long, DEEP], [False, True], 1000) == [long, FREE]


def test_a_thousand_schemas_fit() -> None:
    many = [{"type": "object", "properties": {f"m{i}": DEEP for i in range(20)}} for _ in range(1000)]
    made = fitted(many, [True] * 1000, 300_000)
    assert sum(len(json.dumps(schema)) + 100 for schema in made) <= 300_000
    assert FREE in made
