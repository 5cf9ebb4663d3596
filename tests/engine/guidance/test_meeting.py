"""What meets at one place of a schema is counted before the library makes an automaton of it."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from weft.engine.guidance.meeting import MAX_MULTIPLE, MAX_PATTERNS, check_meeting

Make = Callable[[int], dict[str, Any]]


def obj(**members: Any) -> dict[str, Any]:
    return {"type": "object", "properties": members}


def text(i: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"[a-z]*{chr(97 + i)}[a-z]*"}


def chain(n: int) -> dict[str, Any]:
    links = {f"d{i}": {**text(i), **({"$ref": f"#/$defs/d{i + 1}"} if i < n - 1 else {})} for i in range(n)}
    return {"$defs": links, **obj(a={"$ref": "#/$defs/d0"})}


MEETING: dict[str, Make] = {
    "allOf": lambda n: obj(a={"allOf": [text(i) for i in range(n)]}),
    "nested": lambda n: obj(a={"items": {"allOf": [text(0), {"allOf": [text(i) for i in range(1, n)]}]}}),
    "members": lambda n: {"allOf": [obj(a=text(i)) for i in range(n)]},
    "deep members": lambda n: {"allOf": [obj(a=obj(b=[text(i)][0])) for i in range(n)]},
    "references": lambda n: {
        "$defs": {f"d{i}": text(i) for i in range(n)},
        **obj(a={"allOf": [{"$ref": f"#/$defs/d{i}"} for i in range(n)]}),
    },
    "chain": chain,
    "formats": lambda n: obj(a={"allOf": [{"format": "uri"}, *(text(i) for i in range(n - 1))]}),
    "one of one": lambda n: {"allOf": [{"anyOf": [obj(a=text(i))]} for i in range(n)]},
    "additional": lambda n: {"allOf": [{"additionalProperties": text(i)} for i in range(n)]},
    "alternative": lambda n: obj(a={"anyOf": [{"type": "null"}, {"allOf": [text(i) for i in range(n)]}]}),
}


@pytest.mark.parametrize("form", MEETING)
@pytest.mark.parametrize("is_inline", [False, True])
def test_patterns_that_meet_are_few(form: str, is_inline: bool) -> None:
    """1 kB of schema took both compiling threads for a minute each, and gigabytes."""

    def grammar(n: int) -> dict[str, Any]:
        schema = MEETING[form](n)
        return {"lark_grammar": f"start: %json {json.dumps(schema)}\nx: a"} if is_inline else {"json_schema": schema}

    check_meeting(grammar(MAX_PATTERNS))
    with pytest.raises(ValueError, match="at most 12 patterns and formats may meet at one place"):
        check_meeting(grammar(MAX_PATTERNS + 1))


def multiples(*numbers: float) -> dict[str, Any]:
    return obj(a={"allOf": [{"type": "number", "multipleOf": number} for number in numbers]})


@pytest.mark.parametrize("numbers", [(1,), (0.01,), (1e-7,), (99_991,), (3_000_000,), (97, 89), (0.5, 0.25), (2, 3, 5)])
def test_multiples_that_are_served(numbers: tuple[float, ...]) -> None:
    check_meeting({"json_schema": multiples(*numbers)})


@pytest.mark.parametrize("numbers", [(MAX_MULTIPLE + 1,), (97, 89, 83), (0.0999983, 1), (1 << 40,), (1e300 + 1,)])
def test_multiples_that_would_be_too_large_together(numbers: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="multipleOf must be at most 100000 together"):
        check_meeting({"json_schema": multiples(*numbers) if numbers[0] != 1e300 + 1 else multiples(123456789e291)})


def test_the_line_of_the_schema_is_told() -> None:
    """So that of several tools only this one is loosened."""
    schemas = [json.dumps(MEETING["allOf"](n)) for n in (1, MAX_PATTERNS + 1)]
    with pytest.raises(ValueError, match=r"^at 3\(1\): at most 12 patterns"):
        check_meeting({"lark_grammar": f"start: a b\na: %json {schemas[0]}\nb: %json {schemas[1]}"})


def test_what_does_not_meet_may_be_many() -> None:
    for schema in (
        obj(**{f"p{i}": text(i % 26) for i in range(500)}),
        obj(a={"anyOf": [text(i % 26) for i in range(500)]}),
        {"anyOf": [obj(id={"format": "uuid"}, a=text(i % 26)) for i in range(500)]},
        {"allOf": [obj(**{f"p{i}": text(i % 26)}) for i in range(500)]},
        obj(pattern={"type": "string"}, format={"type": "string"}, multipleOf={"type": "integer"}),
        {"pattern": 5, "multipleOf": "x", "allOf": 7, "$ref": ["#"], "anyOf": [None, 1], "properties": []},
    ):
        check_meeting({"json_schema": schema})
    check_meeting({"lark_grammar": "start: %json {broken\nx: %json"})
    check_meeting({"json_schema": json.dumps(obj(a=text(1)))})


def test_schemas_that_refer_to_themselves_come_to_an_end() -> None:
    value: dict[str, Any] = {"$ref": "#/$defs/v"}
    parts = [{"type": "string"}, {"type": "array", "items": value}, {"additionalProperties": value}, value]
    begin = time.process_time()
    for root in (
        {"$defs": {"v": {"anyOf": parts}}, **value},
        {"$defs": {"v": {"allOf": [value, text(1)]}}, **obj(a=value, b={"allOf": [value, value]})},
        {"$ref": "#"},
        {"$defs": {"v": {"anyOf": parts * 40}}, **obj(**{f"p{i}": value for i in range(2000)})},
    ):
        check_meeting({"json_schema": root})
    assert time.process_time() - begin < 2
