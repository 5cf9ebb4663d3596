"""Loosens a JSON schema until a grammar can follow it: leaves out what cannot be enforced, and says what that was.

Schemas of tools come from people who never met a grammar: with look-around in patterns, types of other languages,
references to nowhere. What is left out is the smallest thing: a keyword, else the schema that holds it; what is deeper
than MAX_NESTING levels is free. The values that the result allows include all that the schema allows, except where the
schema allows none.

References of the result are `#/$defs/0` and so on, and `$defs` holds just their targets, so any part may be taken out
together with `$defs`; each has its path as a comment. The same schema always gives the same result. O(values), of which
at most MAX_PARTS are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from weft.server.json_schema.exclusive import Exclusion
from weft.server.json_schema.keywords import (
    FREE_OBJECT,
    Notes,
    Schema,
    read_bounds,
    read_lengths,
    read_text,
    read_type,
    read_values,
    types_in,
)
from weft.server.json_schema.patterns import portable, prefix_of
from weft.server.json_schema.references import MAX_NESTING, References, ends
from weft.server.json_schema.spellings import usual

MAX_PARTS = 2**14
"""Most schemas inside one schema. What comes after them is free."""
MAX_REFERENCES = 1024
MAX_EXACT_NESTING = 64
"""As many levels as a schema may have at all."""
_MAX_ROUNDS = 64

_UNENFORCED = (
    *("not", "if", "contains", "uniqueItems", "propertyNames", "dependencies", "dependentRequired"),
    *("dependentSchemas", "$dynamicRef", "$recursiveRef"),
)
_ONLY_FOR = {
    **dict.fromkeys(("contains", "uniqueItems"), "array"),
    **dict.fromkeys(("propertyNames", "dependencies", "dependentRequired", "dependentSchemas"), "object"),
}
"""They say nothing about values of other types."""
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_CHOICES = ("anyOf", "oneOf", "allOf", "enum", "const")
"""Beside these, a schema without a type may allow objects and others."""
_BRANCHES = frozenset(("anyOf", "oneOf", "allOf", "$ref", "if"))
"""Beside these, what is evaluated depends on the value."""
_MORE_MEMBERS = ("if", "dependentSchemas", "anyOf", "oneOf", "allOf", "$ref")
"""What may name members that `properties` does not."""
_NOTHING_ASKED: tuple[object, ...] = (None, False, {}, [])


@dataclass(frozen=True, slots=True)
class Loosened:
    """A schema that a grammar can follow; see `Notes` for `lost` and `wrong`."""

    schema: Schema
    lost: Sequence[str]
    wrong: Sequence[str]


def loosened(schema: Schema, *, is_exact: bool = False) -> Loosened:
    """Loosen a schema; if `is_exact`, only of what no grammar can follow, whatever it costs."""
    walk = _Walk(schema, is_exact)
    root = walk.read(schema, "", 0)
    walk.read_definitions()
    result = root if isinstance(root, dict) else {}
    for _ in range(MAX_REFERENCES):  # formats look for the members of the root in the root
        if result.keys() - {"$comment"} != {"$ref"}:
            break
        target = walk.definitions[result["$ref"].removeprefix("#/$defs/")]
        result = target if isinstance(target, dict) else {}
    if walk.definitions:
        result = {**result, "$defs": walk.definitions}
    exclusion = Exclusion(result)
    walk.notes.lost += [f"{at}.oneOf" for part, at in walk.choices if not exclusion.holds(part)]
    return Loosened(result, walk.notes.lost, walk.notes.wrong)


def loosened_arguments(schema: Schema, *, is_exact: bool = False) -> Loosened:
    """Loosen the schema of a tool's arguments, which are an object: if it allows none, to any object."""
    made = loosened(schema, is_exact=is_exact)
    if not _allows_objects(made.schema):
        return Loosened(FREE_OBJECT, [*made.lost, ".type"], [*made.wrong, ".type must allow an object"])
    if (made.lost or (schema and not made.schema)) and made.schema.keys() <= {"type", "$defs"}:
        return replace(made, schema=FREE_OBJECT)  # such as members without a schema around them
    is_plain = made.schema.keys().isdisjoint(("type", *_CHOICES))
    return made if is_plain else replace(made, schema={**made.schema, "type": "object"})


def _allows_objects(schema: Any) -> bool:
    """Whether a schema that was read may allow an object; what references mean is not looked at."""
    if not isinstance(schema, dict):
        return schema is not False
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    choices = [any(map(_allows_objects, schema[key])) for key in ("anyOf", "oneOf") if key in schema]
    return (
        "object" in (types_in(schema) or ["object"])
        and (not values or any(isinstance(value, dict) for value in values))
        and all(choices)
        and all(map(_allows_objects, schema.get("allOf", ())))
    )


class _Walk:
    """Reads one schema. The targets of its references are read after it, each once."""

    def __init__(self, root: Schema, is_exact: bool) -> None:
        self.notes = Notes(is_exact)
        self._max_depth = MAX_EXACT_NESTING if is_exact else MAX_NESTING
        self.definitions: dict[str, Any] = {}
        self.choices: list[tuple[Schema, str]] = []  # with `oneOf`, and where
        self._references = References(root)
        self._names: dict[str, str] = {}  # of the definitions, by the path of what they define
        self._waiting: list[tuple[str, Any, str]] = []
        self._first_uses: dict[str, tuple[str, Any]] = {}  # of the definitions: where, and how they are called there
        self._num_parts = 0

    def read(self, value: Any, at: str, depth: int) -> Any:
        """A loosened schema: an object, or a boolean."""
        if isinstance(value, bool):
            return value
        if value is None or value == []:
            return {}
        if isinstance(value, str):
            value = {"type": value}
        self._num_parts += 1
        if not isinstance(value, dict) or depth > self._max_depth or self._num_parts > MAX_PARTS:
            if self._num_parts <= MAX_PARTS + 1:
                self.notes.lost.append(at)
            if not isinstance(value, dict):
                self.notes.wrong.append(f"{at} must be a schema")
            return {}
        value = usual(value)
        out: Schema = {}
        for read in (read_type, read_values, read_bounds, read_lengths, read_text):
            read(value, out, self.notes, at)
        for read_parts in (self._object, self._array, self._branches_of, self._reference):
            read_parts(value, out, at, depth)
        types = types_in(out)
        for key in _UNENFORCED:
            is_asked = value.get(key) not in _NOTHING_ASKED and (not types or _ONLY_FOR.get(key, types[0]) in types)
            if key == "if":
                is_asked = is_asked and not value.keys().isdisjoint(("then", "else"))
            if is_asked and not (key == "uniqueItems" and out.get("maxItems", 2) < 2):
                self.notes.lose(at, key)
        for key in _UNEVALUATED:
            if value.get(key, True) is not True and not _BRANCHES.isdisjoint(value):
                self.notes.lose(at, key)
        if "properties" in out and any(value.get(key) is not None and key not in out for key in _MORE_MEMBERS):
            out.setdefault("additionalProperties", True)
        if value.get("nullable") is True and out and not {"type", "enum"} & out.keys():
            return {"anyOf": [out, {"type": "null"}]}
        return out

    def read_definitions(self) -> None:
        """Read what references point to, and free those that no value could ever end."""
        while self._waiting:
            name, target, at = self._waiting.pop()
            read = self.read(target, at, 2)
            self.definitions[name] = {**read, "$comment": at} if isinstance(read, dict) else read
        finite: set[str] = set()
        for _ in range(_MAX_ROUNDS):
            new = {name for name, part in self.definitions.items() if name not in finite and ends(part, finite)}
            if not new:
                break
            finite |= new
        for name in [name for name in self.definitions if name not in finite]:
            self.definitions[name] = {}
            at, reference = self._first_uses[name]
            self.notes.refuse(at, "$ref", reference)

    def _object(self, given: Schema, out: Schema, at: str, depth: int) -> None:
        members = given.get("properties")
        if isinstance(members, dict):
            read = {name: self.read(part, f"{at}.properties.{name}", depth + 2) for name, part in members.items()}
            out["properties"] = read
        elif members is not None:
            self.notes.refuse(at, "properties", members)
        others = _others(given, "additionalProperties", "unevaluatedProperties")
        if isinstance(others, bool | dict):
            out["additionalProperties"] = self.read(others, f"{at}.additionalProperties", depth + 1)
        elif others is not None:
            self.notes.refuse(at, "additionalProperties", others)
        self._patterns(given, out, at, depth)
        self._required(given, out, at)

    def _patterns(self, given: Schema, out: Schema, at: str, depth: int) -> None:
        patterns = given.get("patternProperties")
        if patterns is None or patterns == {}:
            return
        if not isinstance(patterns, dict):
            self.notes.refuse(at, "patternProperties", patterns)
            return
        path = f"{at}.patternProperties"
        read = {pattern: portable(pattern) for pattern in patterns}
        prefixes = [prefix_of(pattern) for pattern in patterns]
        is_apart = (
            self.notes.is_exact
            or len(patterns) == 1
            or not any(
                a is None or b is None or a.startswith(b) or b.startswith(a) for a, b in combinations(prefixes[:64], 2)
            )
        )
        kept = {key: written for key, written in read.items() if written is not None and is_apart and len(read) <= 64}
        for key in read:
            if key not in kept:
                self.notes.lose(path, key)
        if len(kept) < len(read):  # members of these names are allowed, whatever they hold
            out["additionalProperties"] = True
        if kept:
            parts = {key: self.read(patterns[key], f"{path}.{key}", depth + 2) for key in kept}
            out["patternProperties"] = {written: parts[key] for key, written in kept.items()}

    def _required(self, given: Schema, out: Schema, at: str) -> None:
        """Read `required`: names, or, as in draft 3, a boolean in the member itself."""
        members, names = out.get("properties", {}), given.get("required")
        listed = names if isinstance(names, list) else [names] if isinstance(names, str) else []
        found = [name for name in listed if isinstance(name, str)]
        if len(found) < len(listed) or not isinstance(names, list | str | bool | None):
            self.notes.refuse(at, "required", names)
        for name in members:
            part = given["properties"][name]
            if isinstance(part, dict) and part.get("required") is True:
                found.append(name)
                if self.notes.is_exact:
                    self.notes.refuse(f"{at}.properties.{name}", "required", True)
        is_closed = out.get("additionalProperties") is False and "patternProperties" not in out
        for name in [name for name in found if is_closed and name not in members]:
            self.notes.refuse(at, "required", name, {"properties": [*members], "additionalProperties": False})
            found.remove(name)
        for name in found:
            if members.get(name) is False:
                self.notes.refuse(f"{at}.properties", name, False)
                members[name] = {}
        if found:
            out["required"] = list(dict.fromkeys(found))

    def _array(self, given: Schema, out: Schema, at: str, depth: int) -> None:
        items, first = _others(given, "items", "unevaluatedItems"), given.get("prefixItems")
        if isinstance(items, list):  # as before draft 2020
            first, items = items, given.get("additionalItems")
        if isinstance(first, list):
            out["prefixItems"] = [self.read(part, f"{at}.prefixItems[{i}]", depth + 2) for i, part in enumerate(first)]
        elif first is not None:
            self.notes.refuse(at, "prefixItems", first)
        if items is not None:
            out["items"] = self.read(items, f"{at}.items", depth + 1)
        if out.get("items") is False and out.get("minItems", 0) > len(out.get("prefixItems", ())):
            self.notes.refuse(at, "minItems", out.pop("minItems"), {"items": False})

    def _branches_of(self, given: Schema, out: Schema, at: str, depth: int) -> None:
        for key in ("anyOf", "oneOf", "allOf"):
            parts = given.get(key)
            if parts is None or (parts == [] and key == "allOf"):
                continue
            read = []
            if isinstance(parts, list):
                read = [self.read(part, f"{at}.{key}[{i}]", depth + 2) for i, part in enumerate(parts)]
            if read and not (all if key != "allOf" else any)(part is False for part in read):
                out[key] = read
                self.choices += [(out, at)] if key == "oneOf" else []
            else:
                self.notes.refuse(at, key, parts)

    def _reference(self, given: Schema, out: Schema, at: str, depth: int) -> None:
        reference = given.get("$ref")
        if reference is None:
            return
        found = self._references.find(reference) if isinstance(reference, str) else None
        if found is None or len(self._names) >= MAX_REFERENCES:
            self.notes.refuse(at, "$ref", reference)
            return
        target, path = found
        if path not in self._names:
            name = self._names[path] = str(len(self._names))
            self._first_uses[name] = at, reference
            self._waiting.append((name, target, path.removeprefix("#").replace("/", ".")))
        out["$ref"] = f"#/$defs/{self._names[path]}"


def _others(given: Schema, key: str, unevaluated: str) -> Any:
    """The schema of what is not named; without branches, both keywords mean the same."""
    value = given.get(key)
    return given.get(unevaluated) if value is None and _BRANCHES.isdisjoint(given) else value
