from typing import Any

import pytest

from server.parsers.schema import guided_schema

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
    assert style == {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
