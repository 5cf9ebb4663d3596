"""Reads the keywords of one schema that hold values, not schemas: types, listed values, bounds, lengths and formats.

Each function writes to `out` what `llguidance` can follow, and tells what it leaves out. Words of other languages and
older drafts keep their meaning where it is clear: `int`, `OBJECT`, `nullable`, 10.0 for a length, bounds as text. A
keyword that is null counts as absent.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from weft.server.json_schema.patterns import portable

Schema = dict[str, Any]

ANY = ""
"""What `any` and its like mean: every type."""
_OWN_TYPES = frozenset(("object", "array", "string", "integer", "number", "boolean", "null"))
_TYPES = {
    **{name: name for name in _OWN_TYPES},
    **dict.fromkeys(("any", "mixed", "unknown", "json", "jsonb", "variant", "*"), ANY),
    **dict.fromkeys(("int", "int8", "int16", "int32", "int64", "uint", "uint8", "uint16", "uint32"), "integer"),
    **dict.fromkeys(("uint64", "long", "short", "bigint"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double", "decimal", "real"), "number"),
    **dict.fromkeys(("bool", "logical"), "boolean"),
    **dict.fromkeys(("str", "text", "char", "varchar", "date", "datetime", "date-time", "time", "uuid"), "string"),
    **dict.fromkeys(("uri", "url", "email", "binary", "bytes", "path", "enum"), "string"),
    **dict.fromkeys(("list", "tuple", "set", "sequence"), "array"),
    **dict.fromkeys(("dict", "map", "mapping", "struct", "record", "hash"), "object"),
    **dict.fromkeys(("none", "nil", "undefined", "nonetype"), "null"),
}
_KINDS: tuple[tuple[type, str], ...] = (
    *((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (type(None), "null")),
    *((list, "array"), (object, "object")),
)
_FORMATS = frozenset(("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LENGTHS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
FREE_OBJECT: Schema = {"type": "object", "additionalProperties": True}
"""Any arguments; a tool whose schema is empty takes none."""
MAX_BOUND = 9 * 10**18
"""Largest bound of a number that a grammar can hold: about that of 64 bits."""
MIN_BOUND = 1e-50
"""The bound nearest to 0 besides 0."""
_MAX_MULTIPLE = 2**16
"""Largest `multipleOf`, its point left out. The time of masks grows with it: 4 s for a million."""
_MAX_LENGTH = 2**31
_MAX_NUMBER_CHARS = 40
_MAX_DEPTH_OF_VALUES = 8


@dataclass(slots=True)
class Notes:
    """What was found on the way.

    Attributes:
        lost: Paths of the keywords that are left out, from the root of the schema on: `.properties.x.pattern`.
        wrong: Which of them mean nothing, in any dialect, or allow nothing: sentences that begin with such a path.
        is_exact: Nothing is left out for its size or cost: the compiler tells what it cannot follow. Types of other
            languages and members that call themselves required are refused.
    """

    is_exact: bool = False

    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def lose(self, at: str, key: str) -> None:
        """Note that a keyword is left out."""
        self.lost.append(f"{at}.{key}")

    def refuse(self, at: str, key: str, value: object, beside: Schema | None = None) -> None:
        """Note that a keyword is left out because its value means nothing, or nothing beside others."""
        others = [f"{name} {json.dumps(other)[:80]}" for name, other in (beside or {}).items() if name != key]
        text = " beside " + ", ".join(others) if others else ""
        self.wrong.append(f"{at}.{key} cannot be {json.dumps(value)[:80]}{text}")
        self.lose(at, key)


def read_type(given: Schema, out: Schema, notes: Notes, at: str) -> None:
    """Read `type` and OpenAPI's `nullable`; without a type that is known, every type is allowed."""
    value = given.get("type")
    if value is None:
        return
    words = value if isinstance(value, list) else value.split("|") if isinstance(value, str) else []
    names = [_TYPES.get(word.strip().lower()) if isinstance(word, str) else None for word in words]
    is_foreign = notes.is_exact and not _OWN_TYPES.issuperset(str(word).strip().lower() for word in words)
    if not names or None in names or is_foreign:
        notes.refuse(at, "type", value)
        return
    if ANY in names:
        return
    if given.get("nullable") is True:
        names.append("null")
    unique = list(dict.fromkeys(names))
    out["type"] = unique[0] if len(unique) == 1 else unique


def types_in(schema: Schema) -> list[str]:
    """The types that a schema which was read names; empty: any type."""
    named = schema.get("type", [])
    return [named] if isinstance(named, str) else named


def read_values(given: Schema, out: Schema, notes: Notes, at: str) -> None:
    """Read `enum` and `const`. They count more than a type that none of their values has."""
    if "const" in given and (given["const"] is not None or _has_type(None, types_in(out) or ["null"])):
        out["const"] = given["const"]
    values = given.get("enum")
    if _is_deep(values, _MAX_DEPTH_OF_VALUES) or _is_deep(out.get("const"), _MAX_DEPTH_OF_VALUES):
        out.pop("const", None)
        notes.lose(at, "enum" if values else "const")
    elif isinstance(values, list) and values:
        is_nullable = given.get("nullable") is True and None not in values
        out["enum"] = [*values, None] if is_nullable else values
    elif values is not None:
        notes.refuse(at, "enum", values)
    listed = [out["const"]] if "const" in out else out.get("enum")
    if listed is not None and "type" in out and not any(_has_type(value, types_in(out)) for value in listed):
        notes.refuse(at, "type", out.pop("type"), out)


def _is_deep(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deep(part, levels - 1) for part in inner if isinstance(part, dict | list))


def kind_of(value: object) -> str:
    """The type of a value in JSON; that of a whole number is integer."""
    kind = next(name for python_type, name in _KINDS if isinstance(value, python_type))
    return "integer" if isinstance(value, float) and value.is_integer() else kind


def _has_type(value: object, names: Iterable[str]) -> bool:
    kind = kind_of(value)
    return kind in names or (kind == "integer" and "number" in names)


def read_bounds(given: Schema, out: Schema, notes: Notes, at: str) -> None:
    """Read the bounds of numbers and `multipleOf`; bounds that leave no number are left out together."""
    found: dict[str, float] = {}
    for key in _BOUNDS:
        value = given.get(key)
        if value is None or (isinstance(value, bool) and key.startswith("exclusive")):
            continue
        number = _number(value)
        if number is None:
            notes.refuse(at, key, value)
        elif _is_held(number) or notes.is_exact:
            found[key] = number
        else:
            notes.lose(at, key)
    for plain, exclusive in zip(_BOUNDS[:2], _BOUNDS[2:], strict=True):
        if given.get(exclusive) is True and plain in found:  # as in draft 4
            found[exclusive] = found.pop(plain)
    if found and not _leave_a_number(found, is_integer=out.get("type") == "integer"):
        for key in found:
            notes.refuse(at, key, given.get(key), {**found, "type": out.get("type", "number")})
        found = {}
    out.update(found)
    _read_multiple(given, out, notes, at)


def _number(value: object) -> float | None:
    """The number that a value is or spells."""
    if isinstance(value, str) and len(value) <= _MAX_NUMBER_CHARS:
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_held(number: float) -> bool:
    return -MAX_BOUND <= number <= MAX_BOUND and (number == 0 or abs(number) >= MIN_BOUND)


def _range(found: dict[str, float], *, is_integer: bool) -> tuple[float, float]:
    """The least and the largest number; of integers those that are in the range."""
    low, above = found.get("minimum", -math.inf), found.get("exclusiveMinimum", -math.inf)
    high, below = found.get("maximum", math.inf), found.get("exclusiveMaximum", math.inf)
    if not is_integer:
        return max(low, above), min(high, below)
    lows = [math.ceil(low)] if low > -math.inf else []
    lows += [math.floor(above) + 1] if above > -math.inf else []
    highs = [math.floor(high)] if high < math.inf else []
    highs += [math.ceil(below) - 1] if below < math.inf else []
    return max(lows, default=-math.inf), min(highs, default=math.inf)


def _leave_a_number(found: dict[str, float], *, is_integer: bool) -> bool:
    low, high = _range(found, is_integer=is_integer)
    is_open = not is_integer and (
        found.get("exclusiveMinimum", -math.inf) == low or found.get("exclusiveMaximum", math.inf) == high
    )
    return low < high or (low == high and not is_open)


def _read_multiple(given: Schema, out: Schema, notes: Notes, at: str) -> None:
    value = given.get("multipleOf")
    if value is None:
        return
    number = _number(value)
    if number is None or number <= 0:
        notes.refuse(at, "multipleOf", value)
        return
    low, high = _range(out, is_integer=True)
    has_multiple = high - low >= number or math.floor(high / number) * number >= low
    if notes.is_exact or (has_multiple and _digits(number) <= _MAX_MULTIPLE):
        out["multipleOf"] = number
    else:
        notes.lose(at, "multipleOf")


def _digits(number: float) -> float:
    """The number without its point, counted as `llguidance` does: rounding errors make some numbers long."""
    while number <= _MAX_MULTIPLE and number != number // 1:
        number *= 10
    return number


def read_lengths(given: Schema, out: Schema, notes: Notes, at: str) -> None:
    """Read the bounds on the size of texts, lists and objects; a pair that leaves no size is left out."""
    for least, most in _LENGTHS:
        sizes = {key: _length(given[key], key, notes, at) for key in (least, most) if given.get(key) is not None}
        found = {key: size for key, size in sizes.items() if size is not None}
        if least in found and most in found and found[least] > found[most]:
            for key in (least, most):
                notes.refuse(at, key, found[key], found)
            found = {}
        out.update(found)


def _length(value: object, key: str, notes: Notes, at: str) -> int | None:
    """The size that a value means; None: it bounds nothing, which is noted where it should have."""
    number = _number(value)
    if number is None or number != number // 1 or (number < 0 and key.startswith("max")):
        notes.refuse(at, key, value)
        return None
    if number < 0:
        return None
    if number > _MAX_LENGTH:
        notes.lose(at, key)
        return None
    return int(number)


def read_text(given: Schema, out: Schema, notes: Notes, at: str) -> None:
    """Read `pattern` and `format`. A format of other types than text is an annotation."""
    pattern, format = given.get("pattern"), given.get("format")
    if isinstance(pattern, str):
        if (rewritten := portable(pattern)) is not None:
            out["pattern"] = rewritten
        else:
            notes.lose(at, "pattern")
    elif pattern is not None:
        notes.refuse(at, "pattern", pattern)
    if isinstance(format, str) and format in _FORMATS:
        out["format"] = format
    elif format and "string" in (types_in(out) or ["string"]):
        notes.lose(at, "format")
