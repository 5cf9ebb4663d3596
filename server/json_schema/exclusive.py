"""Tells whether the branches of a `oneOf` exclude each other, and which objects are closed.

A grammar follows `oneOf` as `anyOf`, which means the same if no value fits two branches. That is seen by types, listed
values and members: one that both sides ask for as different things, or that one side asks for and the other forbids.
Takes schemas from `loosen`.
"""

from itertools import combinations
from typing import Any

from weft.server.json_schema.keywords import Schema, kind_of, types_in

_MAX_STEPS = 2**16
"""Most parts of one schema that are compared; then branches count as not exclusive."""
_MAX_DEPTH = 12
_KINDS = frozenset(("object", "array", "string", "integer", "number", "boolean", "null"))
"""Of values; here a whole number is an integer only."""
_OPEN = frozenset(("anyOf", "oneOf", "prefixItems", "additionalProperties", "patternProperties", "$ref"))
"""An object with one of these is not closed though it declares its members."""
_Side = list[Schema]  # that hold together


def may_close(part: Any) -> bool:
    """Whether objects of a schema may be closed: schemas that apply together would exclude each other."""
    if isinstance(part, dict) and ("allOf" in part or {"$ref", "properties"} <= part.keys()):
        return False
    return all(map(may_close, part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()))


def is_closed(part: Schema) -> bool:
    """Whether an object that may be closed declares all that it may have."""
    members = part.get("properties")
    return members is not None and not _OPEN & part.keys() and all(name in members for name in part.get("required", ()))


class Exclusion:
    """Compares the branches of one schema, with its definitions in `$defs`."""

    def __init__(self, root: Schema) -> None:
        self._definitions, self._may_close, self._num_steps = root.get("$defs", {}), may_close(root), 0

    def holds(self, schema: Schema) -> bool:
        """Whether no value fits two branches of the `oneOf` of a schema inside the root."""
        base = {key: value for key, value in schema.items() if key != "oneOf"}
        closes = "properties" not in base
        sides = [self._side(base, 0, closes=False) + self._side(part, 0, closes=closes) for part in schema["oneOf"]]
        return all(self._are_apart(a, b, 0) for a, b in combinations(sides, 2))

    def _side(self, part: Any, depth: int, *, closes: bool = True) -> _Side:
        """A schema, with what it refers to and what must hold beside it."""
        self._num_steps += 1
        if not isinstance(part, dict) or depth > _MAX_DEPTH or self._num_steps > _MAX_STEPS:
            return [{"enum": []} if part is False else {}]
        inner = [*part.get("allOf", ())]
        inner += [self._definitions[part["$ref"].removeprefix("#/$defs/")]] if "$ref" in part else []
        if closes and self._may_close and is_closed(part):
            part = {**part, "additionalProperties": False}
        return [part, *(each for other in inner for each in self._side(other, depth + 1))]

    def _are_apart(self, a: _Side, b: _Side, depth: int) -> bool:
        """Whether no value fits both sides."""
        if self._num_steps > _MAX_STEPS or depth > _MAX_DEPTH:
            return False
        for side, other in ((a, b), (b, a)):
            for i, part in enumerate(side):
                if key := next((key for key in ("anyOf", "oneOf") if key in part), ""):
                    rest = [*side[:i], {k: v for k, v in part.items() if k != key}, *side[i + 1 :]]
                    ways = (rest + self._side(way, depth) for way in part[key])
                    return all(self._are_apart(way, other, depth + 1) for way in ways)
        (kinds, listed), (kinds_of_b, listed_of_b) = _values(a), _values(b)
        self._num_steps += (len(listed or ()) + len(listed_of_b or ())) // 16 + 1
        kinds &= kinds_of_b
        if not kinds or (listed is not None and listed_of_b is not None and listed.isdisjoint(listed_of_b)):
            return True
        names = {name for part in (*a, *b) for name in part.get("required", ())} if kinds == {"object"} else ()
        return any(self._are_apart(self._member(a, name), self._member(b, name), depth + 1) for name in names)

    def _member(self, side: _Side, name: str) -> _Side:
        """What must hold of a member."""
        found: _Side = []
        for part in side:
            others = part.get("additionalProperties") is not False or "patternProperties" in part
            found += self._side(part.get("properties", {}).get(name, others), 0)
        return found


def _values(side: _Side) -> tuple[frozenset[str], set[tuple[str, object]] | None]:
    """What kinds of values a side allows, and what tells those apart that it lists; None: it lists none."""
    kinds, listed = _KINDS, None
    for part in side:
        named = {*types_in(part)} or kinds
        kinds &= named | {"integer"} if "number" in named else named
        if "const" in part or "enum" in part:
            values = [part["const"]] if "const" in part else part["enum"]
            listed = {(kind_of(value), len(value) if isinstance(value, list | dict) else value) for value in values}
            kinds &= {kind for kind, _ in listed}
    return kinds, listed
