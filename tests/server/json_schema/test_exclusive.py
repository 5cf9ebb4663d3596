"""Which branches of a `oneOf` a grammar may follow as those of an `anyOf`, and what is said where it may not."""

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from weft.server.errors import JsonSchemaError
from weft.server.formats.grammar import guided_schema
from weft.server.json_schema.loosen import loosened
from weft.server.task.structured_output import exact

TEXT = {"type": "string"}
NUMBER = {"type": "number"}


def obj(required: str = "", **members: Any) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": required.split() or [*members]}


A, B = obj(kind={"const": "a"}), obj(kind={"enum": ["b", "c"]})
DEFINITIONS = {"A": A, "B": B, "Node": obj("kind", kind={"const": "b"}, next={"$ref": "#/$defs/Node"})}

EXCLUSIVE: list[dict[str, Any]] = [
    {"oneOf": [TEXT, NUMBER, {"type": "null"}, {"type": "array"}]},
    {"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "object"]}]},
    {"oneOf": [{"const": 1}, {"const": 2}, {"enum": [3, "1"]}, {"const": [1]}]},
    {"oneOf": [{"const": "a", "title": "A"}, {"type": "integer"}]},
    {"oneOf": [{"type": "integer"}, {"const": 1.5}]},
    {"oneOf": [TEXT]},
    {"oneOf": [False, TEXT]},
    {"oneOf": [A, B]},
    {"oneOf": [A, {**B, "required": []}]},
    {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}, {"type": "null"}]},
    {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/Node"}]},
    {"oneOf": [{"allOf": [{"$ref": "#/$defs/A"}, obj(y=TEXT)]}, {"allOf": [{"$ref": "#/$defs/B"}]}]},
    {"oneOf": [{"anyOf": [TEXT, {"type": "null"}]}, {"oneOf": [NUMBER, {"type": "boolean"}]}]},
    {"oneOf": [obj(n=A), obj(n=B)]},
    # each is closed by the grammar
    {"oneOf": [obj(path=TEXT), obj(url=TEXT)]},
    {"oneOf": [{**obj(path=TEXT), "additionalProperties": False}, obj(path=TEXT, url=TEXT)]},
    {"type": "object", "properties": {"kind": TEXT}, "oneOf": [
        {"properties": {"kind": {"const": k}}, "required": ["kind"]} for k in "ab"]},
    {"type": ["string", "null"], "oneOf": [{"type": ["string", "integer"]}, {"type": ["null", "integer"]}]},
]  # fmt: skip
SHARED: list[dict[str, Any]] = [
    {"oneOf": [{"type": "integer"}, NUMBER]},
    {"oneOf": [{"type": "integer"}, {"const": 1.0}]},
    {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b"]}]},
    {"oneOf": [TEXT, {"maxLength": 3}]},
    {"oneOf": [A, obj("", kind=TEXT)]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{**obj(path=TEXT), "additionalProperties": True}, {**obj(url=TEXT), "additionalProperties": True}]},
    {"oneOf": [{"$ref": "#/$defs/B"}, {"$ref": "#/$defs/Node"}]},
    {"oneOf": [{"type": "array", "items": TEXT}, {"type": "array", "items": NUMBER}]},
    {"oneOf": [{"anyOf": [TEXT, NUMBER]}, {"type": ["null", "string"]}]},
    {"oneOf": [True, TEXT]},
]


def whole(schema: dict[str, Any]) -> dict[str, Any]:
    return {**obj(x=schema), "$defs": DEFINITIONS}


@pytest.mark.parametrize("schema", EXCLUSIVE, ids=str)
def test_what_excludes_itself_is_enforced(schema: dict[str, Any]) -> None:
    """Branches that are references, or numbers, were refused where the schema is strict."""
    made = loosened(whole(schema))
    assert (made.lost, made.wrong) == ([], [])
    guided = guided_schema(exact(whole(schema), "format"))
    assert not LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": guided}]}))


@pytest.mark.parametrize("schema", SHARED, ids=str)
def test_what_may_share_a_value_is_named(schema: dict[str, Any]) -> None:
    """It was followed as `anyOf` without a word; what is strict was refused in words of the library."""
    made = loosened(whole(schema))
    assert (made.lost, made.wrong) == ([".properties.x.oneOf"], [])
    assert "oneOf" in made.schema["properties"]["x"], "any of its branches still has to fit"
    with pytest.raises(JsonSchemaError) as raised:
        exact(whole(schema), "tools[0]", "f", is_object=True)
    assert raised.value.message == (
        "tools[0].properties.x.oneOf cannot be enforced by a grammar: its branches may have values in common (tool 'f')"
    )


VALUES: list[Any] = [
    *(None, True, 1, 1.0, 2, 1.5, "a", "b", "1", [], [1], ["a"], {}, {"kind": "a"}, {"kind": "b"}, {"path": "a"}),
    *({"path": "a", "url": "b"}, {"url": "b"}, {"n": {"kind": "a"}}, {"kind": "a", "y": "b"}, {"a": "x", "b": "y"}),
]


@pytest.mark.parametrize("schema", EXCLUSIVE, ids=str)
def test_no_value_that_a_grammar_allows_fits_two_branches(schema: dict[str, Any]) -> None:
    guided = guided_schema({**schema, "$defs": DEFINITIONS})
    either = {("anyOf" if key == "oneOf" else key): value for key, value in guided.items()}
    strict, loose = (jsonschema.Draft202012Validator(each) for each in (guided, either))
    assert [value for value in VALUES if loose.is_valid(value) and not strict.is_valid(value)] == []


@pytest.mark.parametrize("num", [100, 1000])
def test_the_time_is_bounded(num: int) -> None:
    deep: dict[str, Any] = {"const": "x"}
    for _ in range(40):
        deep = {"oneOf": [obj(m=deep), obj(m=deep)]}
    wide = {"oneOf": [obj(kind={"const": str(i)}) for i in range(num)]}
    assert loosened(obj(x=wide)).lost == ([] if num == 100 else [".properties.x.oneOf"])
    assert ".properties.x.oneOf" in loosened(obj(x=deep)).lost


def test_references_that_multiply_end() -> None:
    """Each of twelve definitions is nine of the next one: 9 ** 12 schemas hold together."""
    many = {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 9} for i in range(12)} | {"12": TEXT}
    schema = {**obj(x={"oneOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}]}), "$defs": many}
    assert loosened(schema).lost == [".properties.x.oneOf"]
