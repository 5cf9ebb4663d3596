from typing import Any

import pytest

from weft.server.formats.grammar import guided_schema

OPEN: dict[str, Any] = {"properties": {"a": {"properties": {"b": {}}}}}
CLOSED = {
    "properties": {"a": {"properties": {"b": {}}, "additionalProperties": False}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (OPEN, CLOSED),
        ({"$defs": {"x": OPEN}, "$ref": "#/$defs/x"}, {"$defs": {"x": CLOSED}, "$ref": "#/$defs/x"}),
        ({"items": OPEN, "prefixItems": [OPEN]}, {"items": CLOSED, "prefixItems": [CLOSED]}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"properties": {}, "anyOf": [{"properties": {}}]}, {"properties": {}, "anyOf": [{"properties": {}}]}),
        ({"allOf": [OPEN, OPEN]}, {"allOf": [OPEN, OPEN]}),
        ({"properties": {}, "additionalProperties": OPEN}, {"properties": {}, "additionalProperties": CLOSED}),
        ({"type": "object"}, {"type": "object"}),
        ({"enum": [OPEN]}, {"enum": [OPEN]}),
    ],
)
def test_only_objects_that_declare_members_and_say_nothing_of_others_are_closed(
    schema: dict[str, Any], closed: dict[str, Any]
) -> None:
    guided = guided_schema(schema)
    style = guided.pop("x-guidance")
    assert guided == closed
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    assert style == {**spaces, "coerce_one_of": True}, "who calls it has looked at `oneOf`"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}}, "required": ["a", "b"]},
        {"$defs": {"x": {"properties": {"b": {}}}}, "$ref": "#/$defs/x", "properties": {"a": {}}},
    ],
)
def test_what_would_exclude_itself_stays_open(schema: dict[str, Any]) -> None:
    assert {key: value for key, value in guided_schema(schema).items() if key != "x-guidance"} == schema
