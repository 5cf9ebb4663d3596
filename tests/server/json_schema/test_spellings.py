"""Odd spellings: what means exactly the same is read as the usual form, and nothing is left out."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from weft.server.formats.grammar import guided_schema
from weft.server.json_schema.loosen import loosened

TEXT = {"type": "string"}
WHOLE = {"type": "integer"}
MEMBERS = {"type": "object", "properties": {"a": TEXT}}


@pytest.mark.parametrize(
    ("odd", "usual"),
    [
        ({"type": "object", "propertyNames": {"type": "string"}}, {"type": "object"}),
        ({"type": "object", "propertyNames": True}, {"type": "object"}),
        ({"type": "object", "propertyNames": {"title": "Key", "minLength": 0}}, {"type": "object"}),
        ({"type": "string", "propertyNames": {"pattern": "^a"}}, TEXT),
        (
            {"type": "object", "propertyNames": {"pattern": "^a", "type": "string"}, "additionalProperties": WHOLE},
            {"type": "object", "patternProperties": {"^a": WHOLE}, "additionalProperties": False},
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": WHOLE},
            {"type": "object", "properties": {"a": WHOLE, "b": WHOLE}, "additionalProperties": False},
        ),
        (
            {"type": "string", "minLength": 1.0, "maxLength": "3", "pattern": None},
            {**TEXT, "minLength": 1, "maxLength": 3},
        ),
        ({"type": "STRING"}, TEXT),
        ({"type": ["String", None]}, {"type": ["string", "null"]}),
        ({"type": "string", "nullable": "true"}, {"type": ["string", "null"]}),
        ({"type": "string", "format": "", "minLength": ""}, TEXT),
        ({"type": "string", "format": "DATE"}, {"type": "string", "format": "date"}),
        ({"type": "string", "uniqueItems": True}, TEXT),
        ({"type": "integer", "minimum": "0", "maximum": "", "exclusiveMaximum": None}, {**WHOLE, "minimum": 0}),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": "true"}, {**WHOLE, "exclusiveMinimum": 1}),
        ({**MEMBERS, "required": "a"}, {**MEMBERS, "required": ["a"]}),
        ({**MEMBERS, "required": {}}, MEMBERS),
        ({**MEMBERS, "additionalProperties": "False"}, {**MEMBERS, "additionalProperties": False}),
        ({"type": "object", "properties": []}, {"type": "object", "properties": {}}),
        (
            {"type": "object", "properties": {"a": [], "b": "string"}},
            {"type": "object", "properties": {"a": {}, "b": TEXT}},
        ),
        ({"type": "object", "patternProperties": [], "dependentRequired": []}, {"type": "object"}),
        ({"anyOf": TEXT}, {"anyOf": [TEXT]}),
        ({"enum": "a"}, {"enum": ["a"]}),
        ({"type": "array", "items": "string", "uniqueItems": "false"}, {"type": "array", "items": TEXT}),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "maxItems": 1}),
        ({"type": "string", "if": {"minLength": 3}}, TEXT),
    ],
)
def test_what_means_the_same_is_read_as_the_usual_form(odd: dict[str, Any], usual: dict[str, Any]) -> None:
    for schema, expected in (
        (odd, usual),
        ({**MEMBERS, "properties": {"x": odd}}, {**MEMBERS, "properties": {"x": usual}}),
    ):
        made = loosened(schema)
        assert (made.schema, made.lost, made.wrong) == (expected, [], [])
    assert not LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": guided_schema(made.schema)}]}))


@pytest.mark.parametrize(
    ("schema", "lost"),
    [
        ({"type": "object", "propertyNames": {"pattern": "(?=a)"}}, ".propertyNames"),
        ({**MEMBERS, "propertyNames": {"pattern": "^b"}}, ".propertyNames"),
        ({"type": "object", "propertyNames": {"enum": "a"}}, ".propertyNames"),
        ({"type": "array", "uniqueItems": True, "maxItems": 2}, ".uniqueItems"),
        ({"type": ["array", "string"], "contains": TEXT}, ".contains"),
        ({"if": {"minLength": 3}, "then": {"maxLength": 5}}, ".if"),
        ({"type": "string", "minLength": True}, ".minLength"),
        ({"type": "string", "maxLength": 1.5}, ".maxLength"),
        ({"type": "object", "properties": ["a"]}, ".properties"),
        ({**MEMBERS, "additionalProperties": "maybe"}, ".additionalProperties"),
    ],
)
def test_what_has_no_one_meaning_is_left_out_and_told(schema: dict[str, Any], lost: str) -> None:
    assert loosened(schema).lost == [lost]
