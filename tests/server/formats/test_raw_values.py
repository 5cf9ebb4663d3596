import pytest

from weft.server.formats.grammar import types_of
from weft.server.formats.xml_calls import raw_to_json

ROOT = {
    "$defs": {
        "0": {"type": "integer"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Many": {"anyOf": [{"$ref": "#/$defs/Many"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, ["string"]),
        ({"type": ["integer", "null"]}, ["integer", "null"]),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/0"}]}, ["null", "integer"]),
        ({"oneOf": [{"type": "string"}, {}]}, []),
        ({"allOf": [{"type": "object"}, {"required": ["a"]}]}, ["object"]),
        ({"enum": ["a", 3]}, ["integer", "number", "string"]),
        ({"const": "a"}, ["string"]),
        ({"properties": {}}, ["object"]),
        ({"items": {}}, ["array"]),
        ({"$ref": "#/$defs/nowhere"}, []),
        ({"$ref": "#/$defs/Loop"}, []),
        ({"$ref": "#/$defs/Many"}, []),
        (True, []),
        (None, []),
    ],
)
def test_types_of_a_schema(schema: object, types: list[str]) -> None:
    assert types_of(schema, ROOT) == types


@pytest.mark.parametrize(
    ("text", "types", "written"),
    [
        ("5", ["integer"], "5"),
        (" 5\n", ["integer"], "5"),
        ("5.5", ["integer"], '"5.5"'),
        ("5.0", ["number"], "5.0"),
        ("five", ["integer"], '"five"'),
        ("true", ["integer"], '"true"'),
        ("True", ["boolean"], "true"),
        ("false", ["boolean"], "false"),
        ("None", ["null"], "null"),
        ("null", ["null", "string"], "null"),
        ("null", ["string", "null"], '"null"'),
        ("3", ["string", "integer"], '"3"'),
        ("é", ["integer", "string"], '"é"'),
        ('{"a":[1,2]}', ["object"], '{"a": [1, 2]}'),
        ("{'a': [True, None]}", ["object"], '{"a": [true, null]}'),
        ("{'a': 1}", ["string"], "\"{'a': 1}\""),
        ("{'a': f()}", ["object"], "\"{'a': f()}\""),
        ("[{1, 2}]", ["array"], '"[{1, 2}]"'),
        ("[]", ["object"], '"[]"'),
        ("[]", [], "[]"),
        ("5", [], "5"),
        ("x y\n", [], '"x y\\n"'),
        ("NaN", ["number"], '"NaN"'),
        ("1e999", ["number"], '"1e999"'),
        ("9" * 5000, ["integer"], f'"{"9" * 5000}"'),
        ("[" * 100_000, ["array"], f'"{"[" * 100_000}"'),
        ('["\\ud800"]', ["array"], '["\\ud800"]'),
    ],
)
def test_a_raw_value_is_written_as_the_first_type_that_it_fits(text: str, types: list[str], written: str) -> None:
    assert raw_to_json(text, types) == written
