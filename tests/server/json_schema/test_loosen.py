import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from weft.server.formats.grammar import guided_schema
from weft.server.json_schema.keywords import FREE_OBJECT
from weft.server.json_schema.loosen import MAX_PARTS, Loosened, loosened, loosened_arguments
from weft.server.json_schema.references import MAX_NESTING

TEXT = {"type": "string"}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def compiles(made: Loosened) -> bool:
    grammar = {"grammars": [{"json_schema": guided_schema(made.schema)}]}
    return not LLMatcher.validate_grammar(json.dumps(grammar))


UNENFORCED: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    # what is asked of a member; what is left of it; the keywords that are not
    ({"type": "string", "pattern": "^(?=a)"}, TEXT, ["pattern"]),
    ({"type": "string", "pattern": "([a"}, TEXT, ["pattern"]),
    ({"type": "string", "pattern": ["a"]}, TEXT, ["pattern"]),
    ({"type": "string", "pattern": r"\bx", "maxLength": 3}, {"type": "string", "maxLength": 3}, ["pattern"]),
    ({"type": "string", "format": "uint32"}, TEXT, ["format"]),
    ({"type": "string", "format": 5}, TEXT, ["format"]),
    ({"type": "integer", "format": "int32"}, {"type": "integer"}, []),
    ({"type": "integer", "minimum": -(2**63)}, {"type": "integer"}, ["minimum"]),
    ({"type": "integer", "maximum": 2**64}, {"type": "integer"}, ["maximum"]),
    ({"type": "number", "minimum": -1.8e308, "maximum": 1.7e308}, {"type": "number"}, ["minimum", "maximum"]),
    ({"type": "number", "exclusiveMinimum": 5e-324}, {"type": "number"}, ["exclusiveMinimum"]),
    ({"type": "number", "multipleOf": 1e-20}, {"type": "number"}, ["multipleOf"]),
    ({"type": "number", "multipleOf": 0.123456789}, {"type": "number"}, ["multipleOf"]),
    ({"type": "number", "multipleOf": 0}, {"type": "number"}, ["multipleOf"]),
    ({"type": "integer", "multipleOf": 1000003}, {"type": "integer"}, ["multipleOf"]),
    ({"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 3},
     {"type": "integer", "minimum": 1, "maximum": 2}, ["multipleOf"]),
    ({"type": "integer", "minimum": 5, "maximum": 1}, {"type": "integer"}, ["minimum", "maximum"]),
    ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, {"type": "integer"},
     ["exclusiveMinimum", "exclusiveMaximum"]),
    ({"type": "number", "minimum": 1, "exclusiveMaximum": 1}, {"type": "number"}, ["minimum", "exclusiveMaximum"]),
    ({"type": "string", "minLength": 5, "maxLength": 1}, TEXT, ["minLength", "maxLength"]),
    ({"type": "string", "maxLength": 2**40}, TEXT, ["maxLength"]),
    ({"type": "string", "maxLength": -1}, TEXT, ["maxLength"]),
    ({"type": "string", "maxLength": 1.5}, TEXT, ["maxLength"]),
    ({"type": "string", "minLength": "many"}, TEXT, ["minLength"]),
    ({"type": "string", "enum": []}, TEXT, ["enum"]),
    ({"type": "string", "enum": {"a": 1}}, TEXT, ["enum"]),
    ({"type": "integer", "enum": ["1", "2"]}, {"enum": ["1", "2"]}, ["type"]),
    ({"type": "string", "const": 5}, {"const": 5}, ["type"]),
    ({"type": "teapot"}, {}, ["type"]),
    ({"type": 5}, {}, ["type"]),
    ({"type": []}, {}, ["type"]),
    ({"type": ["string", {"type": "null"}]}, {}, ["type"]),
    ({"not": TEXT}, {}, ["not"]),
    ({"type": "array", "items": TEXT, "uniqueItems": True}, {"type": "array", "items": TEXT}, ["uniqueItems"]),
    ({"type": "array", "items": TEXT, "uniqueItems": False}, {"type": "array", "items": TEXT}, []),
    ({"type": "array", "contains": TEXT}, {"type": "array"}, ["contains"]),
    ({"type": "array", "prefixItems": None, "items": {"type": "array", "items": {"not": {"const": 1}}}},
     {"type": "array", "items": {"type": "array", "items": {}}}, ["items.items.not"]),
    ({"type": "array", "items": False, "minItems": 1}, {"type": "array", "items": False}, ["minItems"]),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, {"type": "object"}, ["propertyNames"]),
    ({"type": "object", "patternProperties": {"^(?!_)": TEXT}},
     {"type": "object", "additionalProperties": True}, ["patternProperties.^(?!_)"]),
    ({"type": "object", "patternProperties": {"^a": TEXT, "b$": {"type": "null"}}},
     {"type": "object", "additionalProperties": True}, ["patternProperties.^a", "patternProperties.b$"]),
    ({"type": "object", "patternProperties": {"^a-": TEXT, "^b-": {"type": "null"}}, "additionalProperties": False},
     {"type": "object", "patternProperties": {"^a-": TEXT, "^b-": {"type": "null"}}, "additionalProperties": False},
     []),
    ({"type": "object", "properties": {"a": TEXT}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
     {"type": "object", "properties": {"a": TEXT}, "additionalProperties": True}, ["if"]),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"type": "object"}, ["dependentRequired"]),
    ({"type": "object", "properties": {"a": TEXT}, "unevaluatedProperties": False},
     {"type": "object", "properties": {"a": TEXT}, "additionalProperties": False}, []),
    ({"allOf": [{"type": "object"}], "unevaluatedProperties": False}, {"allOf": [{"type": "object"}]},
     ["unevaluatedProperties"]),
    ({"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False},
     {"type": "object", "properties": {}, "additionalProperties": False}, ["required"]),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]},
     {"type": "object", "properties": {"a": {}}, "required": ["a"]}, ["properties.a"]),
    ({"anyOf": []}, {}, ["anyOf"]),
    ({"anyOf": [False]}, {}, ["anyOf"]),
    ({"anyOf": {"a": TEXT}}, {}, ["anyOf"]),
    ({"anyOf": [TEXT, {"type": "string", "pattern": "(?=a)"}]}, {"anyOf": [TEXT, TEXT]}, ["anyOf[1].pattern"]),
    ({"$ref": "#/$defs/missing"}, {}, ["$ref"]),
    ({"$ref": "https://example.com/schema.json"}, {}, ["$ref"]),
    ({"$ref": "other.json#/a/b"}, {}, ["$ref"]),
    ({"$ref": 5}, {}, ["$ref"]),
    ({"$dynamicRef": "#a"}, {}, ["$dynamicRef"]),
    ({"properties": [TEXT]}, {}, ["properties"]),
    ({"additionalProperties": 5}, {}, ["additionalProperties"]),
    ({"items": 5}, {"items": {}}, ["items"]),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "left", "lost"), UNENFORCED, ids=[str(asked)[:60] for asked, _, _ in UNENFORCED])
def test_the_smallest_part_is_left_out(asked: dict[str, Any], left: dict[str, Any], lost: list[str]) -> None:
    made = loosened(obj(x=asked, y={"type": "integer", "maximum": 3}))
    assert made.schema["properties"] == {"x": left, "y": {"type": "integer", "maximum": 3}}
    assert made.lost == [f".properties.x.{key}" for key in lost]
    assert compiles(made)


MEANT: list[tuple[Any, dict[str, Any]]] = [
    ({"type": "STRING"}, TEXT),
    ({"type": "int"}, {"type": "integer"}),
    ({"type": "float", "minimum": "0", "maximum": "1.5"}, {"type": "number", "minimum": 0, "maximum": 1.5}),
    ({"type": "bool"}, {"type": "boolean"}),
    ({"type": "list", "items": {"type": "str"}}, {"type": "array", "items": TEXT}),
    ({"type": "Dict"}, {"type": "object"}),
    ({"type": "string | null"}, {"type": ["string", "null"]}),
    ({"type": ["str", "None"]}, {"type": ["string", "null"]}),
    ({"type": ["string", "string"]}, TEXT),
    ({"type": "any", "description": "d"}, {}),
    ({"type": "date"}, TEXT),
    ("string", TEXT),
    (None, {}),
    ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
    ({"type": "string", "nullable": True, "enum": ["a"]}, {"type": ["string", "null"], "enum": ["a", None]}),
    ({"anyOf": [TEXT], "nullable": True}, {"anyOf": [{"anyOf": [TEXT]}, {"type": "null"}]}),
    ({"nullable": True}, {}),
    ({"type": "string", "maxLength": 10.0}, {"type": "string", "maxLength": 10}),
    ({"type": "array", "minItems": "2", "maxItems": 3.0}, {"type": "array", "minItems": 2, "maxItems": 3}),
    ({"type": "string", "minLength": -1}, TEXT),
    ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, {"type": "integer", "exclusiveMinimum": 1}),
    ({"type": "integer", "maximum": 9, "exclusiveMaximum": False}, {"type": "integer", "maximum": 9}),
    ({"type": "array", "items": [TEXT], "additionalItems": False},
     {"type": "array", "prefixItems": [TEXT], "items": False}),
    ({"type": "object", "properties": {"a": {"type": "string", "required": True}, "b": {"required": False}}},
     {"type": "object", "properties": {"a": TEXT, "b": {}}, "required": ["a"]}),
    ({"type": "object", "properties": {"a": TEXT}, "required": "a"},
     {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}),
    (dict.fromkeys(("type", "enum", "pattern", "format", "minLength", "minimum", "multipleOf", "required", "$ref",
                    "properties", "items", "anyOf", "allOf", "additionalProperties", "patternProperties")), {}),
    ({"type": "string", "const": None}, TEXT),
    ({"type": ["string", "null"], "const": None}, {"type": ["string", "null"], "const": None}),
    ({"$schema": "nowhere", "$id": "a", "title": "t", "readOnly": True, "x-order": 1, "default": None}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "meant"), MEANT, ids=[str(asked)[:60] for asked, _ in MEANT])
def test_other_dialects_keep_their_meaning(asked: Any, meant: dict[str, Any]) -> None:
    made = loosened(obj(x=asked))
    assert (made.schema, made.lost, made.wrong) == (obj(x=meant), [], [])
    assert compiles(made)


@pytest.mark.parametrize(
    ("asked", "is_wrong"),
    [
        ({"type": "teapot"}, True),
        ({"enum": []}, True),
        ({"type": "integer", "minimum": 5, "maximum": 1}, True),
        ({"$ref": "#/nowhere"}, True),
        ({"properties": [TEXT]}, True),
        (5, True),
        ({"type": "string", "pattern": "^(?=a)"}, False),
        ({"type": "integer", "minimum": -(2**63)}, False),
        ({"not": TEXT}, False),
    ],
)
def test_what_means_nothing_is_told_from_what_cannot_be_enforced(asked: Any, is_wrong: bool) -> None:
    made = loosened(obj(x=asked))
    assert made.lost != []
    assert [text.startswith(".properties.x") for text in made.wrong] == [True] * (len(made.lost) if is_wrong else 0)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"minLength": 5, "maxLength": 1}, "minLength cannot be 5 beside maxLength 1"),
        ({"minItems": "5", "maxItems": 1.0}, "minItems cannot be 5 beside maxItems 1"),
        ({"minimum": 5, "maximum": 1}, 'minimum cannot be 5 beside maximum 1, type "number"'),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
         'exclusiveMinimum cannot be 1 beside exclusiveMaximum 2, type "integer"'),
        ({"type": "string", "enum": [5]}, 'type cannot be "string" beside enum [5]'),
        ({"type": "array", "items": False, "minItems": 5}, "minItems cannot be 5 beside items false"),
        ({"required": ["a"], "properties": {"b": {}}, "additionalProperties": False},
         'required cannot be "a" beside properties ["b"], additionalProperties false'),
        ({"minLength": -0.5}, "minLength cannot be -0.5"),
    ],
)  # fmt: skip
def test_what_means_nothing_beside_another_keyword_names_that(asked: Any, text: str) -> None:
    """A bound that is fine alone was said to be no bound at all."""
    assert loosened(obj(x=asked)).wrong[0] == f".properties.x.{text}"


@pytest.mark.parametrize(
    ("schema", "target"),
    [
        ({**obj(x={"$ref": "#/definitions/A"}), "definitions": {"A": TEXT}}, TEXT),
        ({**obj(x={"$ref": "#/$defs/a~1b%20c"}), "$defs": {"a/b c": TEXT}}, TEXT),
        ({**obj(x={"$ref": "#/anyOf/0"}), "anyOf": [TEXT]}, TEXT),
        ({**obj(x={"$ref": "#there"}), "$defs": {"A": {"$anchor": "there", **TEXT}}}, TEXT),
        ({**obj(x={"$ref": "http://a/b#/$defs/A"}), "$id": "http://a/b", "$defs": {"A": TEXT}}, TEXT),
        # the definition of that name is meant
        ({**obj(x={"$ref": "#/components/schemas/A"}), "$defs": {"A": TEXT}}, TEXT),
        ({**obj(x={"$ref": "#/definitions/A"}), "$defs": {"A": TEXT}}, TEXT),
        ({**obj(x={"$ref": "A"}), "$defs": {"A": TEXT}}, TEXT),
        (obj(x={"$ref": "#/$defs/A", "$defs": {"A": TEXT}}), TEXT),
    ],
)
def test_references_reach_what_they_mean(schema: dict[str, Any], target: dict[str, Any]) -> None:
    made = loosened(schema)
    assert made.schema["properties"]["x"]["$ref"] == "#/$defs/0"
    assert made.schema["$defs"]["0"].pop("$comment")
    assert made.schema["$defs"] == {"0": target}
    assert made.lost == []


def test_a_reference_at_the_root_is_replaced_by_what_it_means() -> None:
    made = loosened({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": obj(x=TEXT), "unused": TEXT}})
    assert {key: made.schema[key] for key in ("type", "properties", "required")} == obj(x=TEXT)
    assert len(made.schema["$defs"]) == 2


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        ({"$ref": "#"}, ""),
        ({"allOf": [{"$ref": "#"}]}, ".allOf[0]"),
        ({"anyOf": [{"$ref": "#"}]}, ".anyOf[0]"),
        (obj(x={"$ref": "#"}), ".properties.x"),
        (obj(x={"$ref": "#/properties/x"}), ".properties.x"),
        (obj(x={"$ref": "#/properties/y"}, y={"$ref": "#/properties/x"}), ".properties.y"),
        (obj(x={"type": "array", "items": {"$ref": "#"}, "minItems": 1}), ".properties.x.items"),
    ],
)
def test_what_no_value_could_end_is_free(schema: dict[str, Any], at: str) -> None:
    made = loosened(schema)
    assert {} in made.schema["$defs"].values()
    assert made.lost[0] == f"{at}.$ref", "where it stands, not what it means"
    assert compiles(made)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"x": {"$ref": "#"}}},
        obj(x={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        obj(x={"type": "array", "items": {"$ref": "#"}}),
        obj(x={"type": ["object", "null"], "properties": {"y": {"$ref": "#"}}, "required": ["y"]}),
    ],
)
def test_what_ends_may_refer_to_itself(schema: dict[str, Any]) -> None:
    made = loosened(schema)
    assert made.lost == []
    assert {} not in made.schema["$defs"].values()
    assert compiles(made)


VALUES: list[Any] = [
    *(None, True, 0, 1, 2.5, 7, -3, "", "a", "ab", "x-1", [], [1], ["a", "a"], [["a"]], {}),
    *({"a": "b"}, {"a": 1}, {"a": "b", "b": 2}, {"x": {"a": "b"}}, {"_a": "b"}),
]


def allowed_by_the_standard(asked: Any) -> list[Any]:
    """The values that a schema allows; none if it is no schema by the standard."""
    schema = obj(x=asked)
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        return [value for value in VALUES if jsonschema.Draft202012Validator(schema).is_valid({"x": value})]
    except Exception:  # libraries below it raise what they like
        return []


ALLOWING = [each for each in [*(asked for asked, _, _ in UNENFORCED), *(asked for asked, _ in MEANT)]
            if allowed_by_the_standard(each)]  # fmt: skip


@pytest.mark.parametrize("asked", ALLOWING)
def test_no_value_is_lost(asked: Any) -> None:
    made = jsonschema.Draft202012Validator(loosened(obj(x=asked)).schema)
    assert [value for value in allowed_by_the_standard(asked) if not made.is_valid({"x": value})] == []


@pytest.mark.parametrize(
    ("parameters", "enforced", "lost"),
    [
        (
            {"type": "OBJECT", "properties": {"x": {"type": "STRING"}}},
            {"type": "object", "properties": {"x": TEXT}},
            [],
        ),
        ({"type": ["object", "null"], "properties": {"x": TEXT}}, {"type": "object", "properties": {"x": TEXT}}, []),
        ({"properties": {"x": TEXT}}, {"properties": {"x": TEXT}}, []),
        ({"type": "array", "items": TEXT}, FREE_OBJECT, [".type"]),
        ({"type": "object"}, {"type": "object"}, []),  # takes none
        ({"$ref": "#/nowhere"}, FREE_OBJECT, [".$ref"]),
        ({"$ref": "#"}, FREE_OBJECT, [".$ref"]),
        ({"type": "object", "propertyNames": {"pattern": "^(?!_)"}}, FREE_OBJECT, [".propertyNames"]),
        ({"type": "object", "properties": []}, {"type": "object", "properties": {}}, []),
        ({}, {}, []),
        ({"title": "X"}, FREE_OBJECT, []),
        ({"a": TEXT, "b": {"type": "integer"}}, FREE_OBJECT, []),  # members without a schema around them
        ({"anyOf": [TEXT, {"type": "number"}]}, FREE_OBJECT, [".type"]),
        ({"allOf": [obj(x=TEXT), TEXT]}, FREE_OBJECT, [".type"]),
        ({"type": "object", "oneOf": [TEXT, {"enum": [1]}]}, FREE_OBJECT, [".type"]),
        ({"enum": ["a", 1]}, FREE_OBJECT, [".type"]),
        ({"const": 5}, FREE_OBJECT, [".type"]),
        ({"enum": ["a", {"x": 1}]}, {"enum": ["a", {"x": 1}], "type": "object"}, []),
        ({"oneOf": [obj(x=TEXT), TEXT]}, {"oneOf": [obj(x=TEXT), TEXT], "type": "object"}, []),
        ({"allOf": [{"anyOf": [TEXT, {}]}]}, {"allOf": [{"anyOf": [TEXT, {}]}], "type": "object"}, []),
    ],
)
def test_arguments_are_an_object(parameters: dict[str, Any], enforced: dict[str, Any], lost: list[str]) -> None:
    made = loosened_arguments(parameters)
    assert (made.schema, made.lost) == (enforced, lost)


def test_depth_and_number_are_bounded() -> None:
    deep: dict[str, Any] = TEXT
    for _ in range(MAX_NESTING):
        deep = {"type": "array", "items": deep}
    assert loosened({"type": "array", "items": deep}).lost == [".items" * (MAX_NESTING + 1)]
    wide = loosened({"anyOf": [TEXT] * (MAX_PARTS + 5)})
    assert wide.schema["anyOf"][-1] == {} and wide.schema["anyOf"][MAX_PARTS - 2] == TEXT
    assert wide.lost == [f".anyOf[{MAX_PARTS - 1}]"]
    assert loosened(obj(x={"enum": [[[[[[[[[[1]]]]]]]]]]})).lost == [".properties.x.enum"]


def test_a_second_pass_changes_nothing() -> None:
    for asked, _, _ in UNENFORCED:
        once = loosened(obj(x=asked))
        again = loosened(once.schema)
        assert (again.schema, again.lost, again.wrong) == (once.schema, [], [])
