"""JSON schemas of every kind that is supported, all with bounds, so that an answer at random comes to its end."""

from typing import Any

Schema = dict[str, Any]


def _object(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Schema:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


def _text(max_length: int = 8, **more: Any) -> Schema:
    return {"type": "string", "maxLength": max_length, **more}


def _integer(low: int, high: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, **more}


def _halves(low: int, high: int) -> Schema:
    """Without a step, digits may follow the point for ever."""
    return {"type": "number", "minimum": low, "maximum": high, "multipleOf": 0.5}


def _array(items: Any, low: int = 0, high: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high, **more}


_WORD = {"enum": ["red", "green", "blue"]}
_PERSON = _object({"name": _text(), "age": _integer(0, 150)})
_NODE = {"$ref": "#/$defs/node"}

_STRINGS: dict[str, Schema] = {
    **{f"string up to {n}": _text(n) for n in (0, 1, 2, 5, 12, 30)},
    **{f"string of {low} to {high}": _text(high, minLength=low) for low, high in ((1, 1), (2, 4), (5, 5), (3, 20))},
    **{
        f"pattern {pattern}": {"type": "string", "pattern": pattern}
        for pattern in (
            "^[a-z]{3}$",
            "^[A-Z][a-z]{2,6}$",
            "^[0-9]{5}(-[0-9]{4})?$",
            "^(yes|no|maybe)$",
            "^\\+?[0-9]{7,12}$",
            "^#[0-9a-f]{6}$",
            "^[a-z]{1,9}@[a-z]{2,8}\\.(com|org)$",
            "^v[0-9]{1,2}\\.[0-9]{1,2}$",
            "^\\d{3}-\\d{4}$",
            '^[^x-z"\\\\]{2,5}$',
            "^(ab|cd){1,3}$",
            "^a?b?c?$",
            "^[A-Z]{2}[0-9]{2}$",
            "^.{0,6}$",
            "^\\w{1,8}$",
        )
    },
    **{f"format {name}": {"type": "string", "format": name} for name in ("date", "date-time", "uuid", "ipv4")},
    "format email": {"type": "string", "format": "email", "maxLength": 20},
    "pattern and length": {"type": "string", "pattern": "^[a-z]*$", "minLength": 2, "maxLength": 6},
}

_NUMBERS: dict[str, Schema] = {
    **{
        f"integer from {low} to {high}": _integer(low, high)
        for low, high in ((0, 0), (0, 1), (0, 9), (1, 10), (0, 150), (-5, 5), (-100, -10), (100, 999), (7, 1234567))
    },
    **{
        f"number from {low} to {high}": {"type": "number", "minimum": low, "maximum": high}
        for low, high in ((0, 1), (-1, 1), (0.5, 2.5), (-10, 10), (100, 200), (-0.25, 0))
    },
    **{
        f"integer above {low} and below {high}": {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in ((0, 2), (0, 10), (-3, 3), (99, 1000))
    },
    **{f"multiple of {step}": _integer(0, 1000, multipleOf=step) for step in (2, 3, 5, 10, 25)},
    "half numbers": _halves(-3, 3),
    "number above and below": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
}

_VALUES: dict[str, Schema] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "const string": {"const": "weft"},
    "const number": {"const": 42},
    "const object": {"const": {"a": [1, 2, {"b": None}]}},
    "const false": {"const": False},
    "enum of words": _WORD,
    "enum of one": {"enum": ["only"]},
    "enum of mixed values": {"enum": ["a", 1, 2.5, True, None, ["x"], {"k": "v"}]},
    "enum with common starts": {"enum": ["order", "orderId", "orderName", "orders"]},
    "enum with escapes": {"enum": ['say "hi"', "back\\slash", "new\nline", "é", "日本", "🙂"]},
    "enum of numbers": {"enum": [1, 12, 123, -1, 0.5]},
    "typed enum": {"type": "string", "enum": ["on", "off"]},
    "enum of 50": {"enum": [f"value-{i}" for i in range(50)]},
    "boolean or null": {"type": ["boolean", "null"]},
    "integer or null": {"anyOf": [_integer(0, 9), {"type": "null"}]},
    "string or integer": {"anyOf": [_text(4), _integer(0, 99)]},
}

_ARRAYS: dict[str, Schema] = {
    **{
        f"array of {low} to {high} integers": _array(_integer(0, 9), low, high)
        for low, high in ((0, 0), (0, 1), (1, 1), (2, 2), (0, 5), (3, 8), (10, 10))
    },
    "array of words": _array(_WORD, 1, 4),
    "array of strings": _array(_text(5), 1, 3),
    "array of booleans": _array({"type": "boolean"}, 2, 6),
    "array of arrays": _array(_array(_integer(0, 9), 1, 2), 1, 3),
    "array of arrays of arrays": _array(_array(_array({"type": "boolean"}, 1, 2), 1, 2), 1, 2),
    "array of objects": _array(_PERSON, 1, 2),
    "array of either": _array({"anyOf": [_integer(0, 9), _WORD]}, 1, 4),
    "tuple": {"type": "array", "prefixItems": [_WORD, _integer(0, 9)], "items": False, "minItems": 2},
    "tuple and more": {
        "type": "array",
        "prefixItems": [_WORD, {"type": "boolean"}],
        "items": _integer(0, 9),
        "minItems": 2,
        "maxItems": 4,
    },
    "array of nulls": _array({"type": "null"}, 0, 3),
    "array of constants": _array({"const": "x"}, 2, 4),
    "matrix": _array(_array(_halves(0, 4), 2, 2), 2, 2),
}

_OBJECTS: dict[str, Schema] = {
    "empty object": _object({}),
    "person": _PERSON,
    "one boolean": _object({"ok": {"type": "boolean"}}),
    "long names": _object({"name_of_the_person": _text(), "is_a_member_of_the_club": {"type": "boolean"}}),
    "common starts": _object({"orderId": _text(4), "orderName": _text(4), "order": _integer(0, 9)}),
    "all optional": _object({"a": _integer(0, 9), "b": {"type": "boolean"}, "c": _WORD}, []),
    "some optional": _object({"a": _integer(0, 9), "b": {"type": "boolean"}, "c": _WORD}, ["b"]),
    "last one required": _object({"a": _integer(0, 9), "b": {"type": "boolean"}, "c": _WORD}, ["c"]),
    "nested": _object({"outer": _object({"inner": _object({"value": _integer(0, 9)})})}),
    "nested persons": _object({"mother": _PERSON, "father": _PERSON}),
    "object with arrays": _object({"tags": _array(_text(5)), "scores": _array(_integer(0, 100), 1, 3)}),
    "nullable members": _object(
        {"a": {"anyOf": [_text(4), {"type": "null"}]}, "b": {"type": ["integer", "null"], "minimum": 0, "maximum": 99}}
    ),
    "names to escape": _object({'a "b"': {"type": "boolean"}, "c\\d": {"type": "null"}, "é": _WORD}),
    "name with space": _object({"first name": _text(5), "last-name": _text(5)}),
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": _integer(0, 9)},
        "additionalProperties": False,
        "maxProperties": 1,
    },
    "forty members": _object({f"member_{i}": {"type": "boolean"} for i in range(40)}),
    "forty optional members": _object({f"member_{i}": {"type": "boolean"} for i in range(40)}, []),
    "described": _object({"a": {"type": "boolean", "description": "A flag", "title": "A"}}, title="T", description="D"),
    "weather call": _object({"name": {"const": "get_weather"}, "arguments": _object({"city": _text(), "unit": _WORD})}),
    "date range": _object({"from": {"type": "string", "format": "date"}, "to": {"type": "string", "format": "date"}}),
    "steps": _object(
        {"steps": _array(_object({"explanation": _text(10), "output": _text(6)}), 1, 2), "answer": _text()}
    ),
    "invoice": _object(
        {
            "id": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
            "lines": _array(_object({"item": _text(6), "count": _integer(1, 20), "price": _integer(0, 999)}), 1, 2),
            "paid": {"type": "boolean"},
        }
    ),
    "geometry": _object({"kind": {"const": "Point"}, "at": _array(_halves(-90, 90), 2, 2)}),
}

_COMBINED: dict[str, Schema] = {
    "any of objects": {"anyOf": [_PERSON, _object({"company": _text()})]},
    "any of constants": {"anyOf": [{"const": 1}, {"const": "one"}, {"const": [1]}]},
    "one of by kind": {
        "oneOf": [
            _object({"kind": {"const": "circle"}, "radius": _integer(1, 9)}),
            _object({"kind": {"const": "square"}, "side": _integer(1, 9)}),
        ]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 7}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": _integer(0, 9)}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": True, "b": True},
    },
    "reference": {
        "$defs": {"colour": _WORD},
        **_object({"a": {"$ref": "#/$defs/colour"}, "b": {"$ref": "#/$defs/colour"}}),
    },
    "reference under definitions": {"definitions": {"n": _integer(0, 9)}, **_array({"$ref": "#/definitions/n"}, 1, 3)},
    "chain of references": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": _WORD},
        **_object({"value": {"$ref": "#/$defs/a"}}),
    },
    "list by recursion": {
        "$defs": {"node": _object({"value": _integer(0, 9), "next": {"anyOf": [{"type": "null"}, _NODE]}})},
        "$ref": "#/$defs/node",
    },
    "tree by recursion": {
        "$defs": {"node": _object({"name": _WORD, "children": _array(_NODE, 0, 1)})},
        "$ref": "#/$defs/node",
    },
    "recursion to the root": _object({"ok": {"type": "boolean"}, "more": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}),
    "any of with arrays": {"anyOf": [_array(_WORD, 1, 2), _WORD]},
}


def _pairs() -> dict[str, Schema]:
    """Objects of two members, each of another kind."""
    kinds: dict[str, Schema] = {
        "text": _text(5),
        "integer": _integer(-99, 99),
        "number": _halves(0, 9),
        "flag": {"type": "boolean"},
        "word": _WORD,
        "list": _array(_integer(0, 9), 0, 2),
        "object": _object({"x": {"type": "boolean"}}),
        "date": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
    }
    return {
        f"{first} and {second}": _object({first: kinds[first], second: kinds[second]}, [first])
        for first in kinds
        for second in kinds
        if first != second
    }


JSON_SCHEMAS: dict[str, Schema] = {**_STRINGS, **_NUMBERS, **_VALUES, **_ARRAYS, **_OBJECTS, **_COMBINED, **_pairs()}
