"""Tells whether the branches of a `oneOf` exclude each other, and which objects are closed.

A grammar follows `oneOf` as `anyOf`, which means the same if no value fits two branches. That is seen by types, listed
values and members: one that both sides ask for as different things, or that one side asks for and the other forbids.
Takes schemas from `loosen`.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from weft.server.json_schema.keywords import Schema, kind_of, types_in

_MAX_STEPS = 2**14
"""Most comparisons in one schema; then branches count as not exclusive."""
_MAX_DEPTH = 12
_KINDS = frozenset(("object", "array", "string", "integer", "number", "boolean", "null"))
"""Of values; here a whole number is an integer only."""
_ALTERNATIVES = ("anyOf", "oneOf")
_OPEN = frozenset(
    (*_ALTERNATIVES, "prefixItems", "additionalProperties", "patternProperties", "$ref", "if", "unevaluatedProperties")
)
"""An object with one of these is not closed though it declares its members."""

_Side = list[tuple[Schema, bool]]
"""Schemas that hold together, and whether each is closed."""


def may_close(root: Any) -> bool:
    """Whether objects of a schema may be closed: schemas that apply together would exclude each other."""
    return not any("allOf" in part or {"$ref", "properties"} <= part.keys() for part in _objects(root))


def is_closed(part: Schema) -> bool:
    """Whether an object that may be closed declares all that it may have."""
    members = part.get("properties")
    return members is not None and not _OPEN & part.keys() and all(name in members for name in part.get("required", ()))


def _objects(value: Any) -> Iterator[Schema]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(inner)


class Exclusion:
    """Compares the branches of one schema, with its definitions in `$defs`."""

    def __init__(self, root: Schema) -> None:
        self._definitions: Schema = root.get("$defs", {})
        self._may_close = may_close(root)
        self._num_steps = 0

    def holds(self, schema: Schema) -> bool:
        """Whether no value fits two branches of the `oneOf` of a schema inside the root."""
        base = {key: value for key, value in schema.items() if key != "oneOf"}
        closes = "properties" not in base
        sides = [
            [*self._side(base, 0, closes=False), *self._side(branch, 0, closes=closes)] for branch in schema["oneOf"]
        ]
        return all(self._are_apart(a, b, 0) for a, b in combinations(sides, 2))

    def _side(self, part: Any, depth: int, *, closes: bool = True) -> _Side:
        """A schema, with what it refers to and what must hold beside it."""
        if not isinstance(part, dict) or depth > _MAX_DEPTH:
            return [({"enum": []} if part is False else {}, False)]
        inner = [*part.get("allOf", ())]
        inner += [self._definitions[part["$ref"].removeprefix("#/$defs/")]] if "$ref" in part else []
        closed = part.get("additionalProperties") is False and "patternProperties" not in part
        own = part, closed or (closes and self._may_close and is_closed(part))
        return [own, *(each for other in inner for each in self._side(other, depth + 1))]

    def _are_apart(self, a: _Side, b: _Side, depth: int) -> bool:
        """Whether no value fits both sides."""
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS or depth > _MAX_DEPTH:
            return False
        for side, other in ((a, b), (b, a)):
            for i, (part, closed) in enumerate(side):
                for key in _ALTERNATIVES:
                    if key in part:
                        rest = [*side[:i], ({k: v for k, v in part.items() if k != key}, closed), *side[i + 1 :]]
                        ways = ([*rest, *self._side(way, depth)] for way in part[key])
                        return all(self._are_apart(way, other, depth + 1) for way in ways)
        kinds = _kinds(a) & _kinds(b)
        listed, others = _listed(a), _listed(b)
        self._num_steps += (len(listed or ()) + len(others or ())) // 64
        if not kinds or (listed is not None and others is not None and _keys(listed).isdisjoint(_keys(others))):
            return True
        names = {name for part, _ in (*a, *b) for name in part.get("required", ())} if kinds == {"object"} else ()
        return any(self._are_apart(self._member(a, name), self._member(b, name), depth + 1) for name in names)

    def _member(self, side: _Side, name: str) -> _Side:
        """What must hold of a member."""
        found: _Side = []
        for part, closed in side:
            if (given := part.get("properties", {}).get(name, not closed)) is not True:
                found += self._side(given, 0)
        return found


def _listed(side: _Side) -> list[Any] | None:
    """The values that a side lists as the only ones."""
    lists = [
        [part["const"]] if "const" in part else part["enum"] for part, _ in side if {"const", "enum"} & part.keys()
    ]
    return min(lists, key=len, default=None)


def _keys(values: list[Any]) -> set[tuple[str, object]]:
    """What differs where values surely do."""
    return {(kind_of(value), len(value) if isinstance(value, list | dict) else value) for value in values}


def _kinds(side: _Side) -> frozenset[str]:
    """What kinds of values a side allows."""
    kinds, listed = _KINDS, _listed(side)
    for part, _ in side:
        named = {*types_in(part)} or kinds
        kinds = kinds & (named | {"integer"} if "number" in named else named)
    if listed is not None:
        kinds &= set(map(kind_of, listed))
    return kinds
