"""Finds what the references of a JSON schema mean, and which schemas refer to themselves without an end.

Nothing is fetched: a reference leads into its own schema or nowhere. One that misses its target still names a
definition: generators of schemas move definitions, and leave the references behind.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from weft.server.json_schema.keywords import Schema, types_in

MAX_NESTING = 48
"""Most levels of objects and lists down to a schema."""
_SCALARS = ("string", "integer", "number", "boolean", "null")
_DEFINITIONS = ("$defs", "definitions")


class References:
    """What the references of one schema mean."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known: dict[str, tuple[Any, str]] | None = None  # all definitions, by their names

    def find(self, reference: str) -> tuple[Any, str] | None:
        """What a reference means, and its path. If it leads nowhere, the definition of the same name is meant.

        None: there is none either.
        """
        base = self._root.get("$id")
        pointer = reference.removeprefix(base.rstrip("#")) if isinstance(base, str) else reference
        target: Any = self._root
        if pointer in ("", "#"):
            return target, "#"
        for step in map(_unescaped, pointer.split("/")[1:]) if pointer.startswith("#/") else ("",):
            target = _inside(target, step)
        if isinstance(target, dict | bool):
            return target, pointer
        if self._known is None:
            self._known = dict(_definitions(self._root))
        return self._known.get(_unescaped(re.split("[/#]", reference)[-1].removesuffix(".json")))


def _inside(target: Any, step: str) -> Any:
    if isinstance(target, dict):
        return target.get(step)
    is_index = isinstance(target, list) and step.isascii() and step.isdigit() and len(step) < 6
    return target[int(step)] if is_index and int(step) < len(target) else None


def _unescaped(step: str) -> str:
    return unquote(step).replace("~1", "/").replace("~0", "~")


def _definitions(root: Schema) -> Iterator[tuple[str, tuple[Any, str]]]:
    """All definitions in a schema, by their names and their anchors; the outermost of a name comes last."""
    level: list[tuple[Any, str]] = [(root, "#")]
    found: list[tuple[str, tuple[Any, str]]] = []
    for _ in range(MAX_NESTING):
        below: list[tuple[Any, str]] = []
        for value, path in level:
            for key in _DEFINITIONS if isinstance(value, dict) else ():
                named = value.get(key)
                found += [
                    (name, (part, f"{path}/{key}/{name}"))
                    for name, part in (named.items() if isinstance(named, dict) else ())
                    if isinstance(part, dict | bool)
                ]
            if isinstance(value, dict) and isinstance(anchor := value.get("$anchor"), str):
                found.append((anchor, (value, path)))
            inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            below += [(part, f"{path}/{key}") for key, part in inner if isinstance(part, dict | list)]
        level = below
    yield from reversed(found)


def ends(part: Any, finite: set[str]) -> bool:
    """Whether some value of a schema is finite, if the definitions in `finite` have such values."""
    if not isinstance(part, dict) or "enum" in part or "const" in part:
        return True

    def each_ends(inner: Any) -> bool:
        return ends(inner, finite)

    if "$ref" in part and part["$ref"].removeprefix("#/$defs/") not in finite:
        return False
    if not all(map(each_ends, part.get("allOf", ()))):
        return False
    if not all(any(map(each_ends, part[key])) for key in ("anyOf", "oneOf") if key in part):
        return False
    ways: dict[str, Callable[[], bool]] = {
        "object": lambda: all(each_ends(part.get("properties", {}).get(name)) for name in part.get("required", ())),
        "array": lambda: not part.get("minItems") or all(map(each_ends, _first_items(part))),
    }
    types = types_in(part)
    return not types or not set(types).isdisjoint(_SCALARS) or any(ways[name]() for name in types)


def _first_items(part: Schema) -> list[Any]:
    """The schemas of the items that a list must have."""
    items = part.get("prefixItems", [])
    return items[: part["minItems"]] if part["minItems"] <= len(items) else [*items, part.get("items")]
