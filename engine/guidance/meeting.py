"""Counts what must hold together at one place of a JSON schema, before the library makes one automaton of it.

Its size is the product of what meets: 20 patterns took a minute and gigabytes, three multiples 20 seconds, which no
limit of the library bounds. The count does not look at values, so it may be larger than what truly meets.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import cast

MAX_PATTERNS = 12
"""Most patterns and formats that meet; they take 0.1 s at worst, and each one more takes twice as long."""
MAX_MULTIPLE = 100_000
"""Largest number, without zeros at its end, of which a value may have to be a multiple: a second at worst."""
_MAX_PARTS = 1 << 17
"""Most schemas that are looked at, in half a second; a text of 128 KiB has not so many."""

_INLINE = re.compile(r"%json\s*")
_ALTERNATIVES = ("anyOf", "oneOf")
_OTHERS = ("items", "additionalProperties", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems")

_Schema = Mapping[str, object]
_Gathered = tuple[int, list[object], list[list[object]]]
"""How many patterns, which multiples, and the places inside."""


def check_meeting(grammar: Mapping[str, object]) -> None:
    """Check the JSON schemas of a grammar, those inside of its Lark text included.

    Raises:
        ValueError: More meets at one place than the bounds allow.
    """
    schema, lark = grammar.get("json_schema"), grammar.get("lark_grammar")
    if isinstance(schema, str):
        schema = json.loads(schema)
    if isinstance(schema, dict):
        _Count(schema).check([schema])
    if isinstance(lark, str):
        for line, inline in _inline_schemas(lark):
            try:
                _Count(inline).check([inline])
            except ValueError as error:
                raise ValueError(f"at {line}(1): {error}") from None  # as the library says it


def _inline_schemas(lark: str) -> Iterator[tuple[int, _Schema]]:
    decoder = json.JSONDecoder()
    for found in _INLINE.finditer(lark):
        try:
            schema, _ = decoder.raw_decode(lark, found.end())
        except ValueError:
            continue  # the library says what is wrong with it
        if isinstance(schema, dict):
            yield lark.count("\n", 0, found.start()) + 1, schema


class _Count:
    """The count of one schema. Schemas that were looked at together are not looked at again."""

    def __init__(self, root: _Schema) -> None:
        self._root = root
        self._seen: set[frozenset[int]] = set()
        self._alternatives: dict[int, _Gathered] = {}
        self._num_parts = 0

    def check(self, schemas: Sequence[object]) -> None:
        """Check a place where all these schemas must hold, and all places inside it."""
        places = [list(schemas)]
        while places:
            place = [self._meant(part) for part in places.pop()]
            key = frozenset(map(id, place))
            if key in self._seen:
                continue
            self._seen.add(key)
            num_patterns, multiples, members = self._gather(place)
            if num_patterns > MAX_PATTERNS:
                raise ValueError(f"at most {MAX_PATTERNS} patterns and formats may meet at one place of a schema")
            if (multiple := _common(multiples)) > MAX_MULTIPLE:
                raise ValueError(f"multipleOf must be at most {MAX_MULTIPLE} together, got {multiple}")
            places += members

    def _alternative(self, part: object) -> _Gathered:
        """What one of several has; that of a reference to what it stands in counts as nothing."""
        if id(part) not in self._alternatives:
            self._alternatives[id(part)] = 0, [], []
            self._alternatives[id(part)] = self._gather([part])
        return self._alternatives[id(part)]

    def _gather(self, place: list[object]) -> _Gathered:
        """Patterns and multiples at this place, and the places inside it. Of alternatives the worst one counts."""
        num_patterns, multiples = 0, list[object]()
        members, places = defaultdict[str, list[object]](list), list[list[object]]()
        waiting, here = list(place), set[int]()
        while waiting:
            part = waiting.pop()
            if not isinstance(part, dict) or id(part) in here:
                continue
            here.add(id(part))
            self._num_parts += 1
            if self._num_parts > _MAX_PARTS:
                raise ValueError(f"at most {_MAX_PARTS} parts of a schema may meet")
            num_patterns += ("pattern" in part) + ("format" in part)
            if "multipleOf" in part:
                multiples.append(part["multipleOf"])
            waiting += [*_listed(part.get("allOf")), self._target(part.get("$ref"))]
            for key in _ALTERNATIVES:
                if len(others := _listed(part.get(key))) == 1:
                    waiting += others
                    continue
                counts = [self._alternative(other) for other in others]
                if counts:
                    num_patterns += max(count for count, _, _ in counts)
                    multiples += max((numbers for _, numbers, _ in counts), key=_common)
                places += [place for _, _, inner in counts for place in inner]
            for key in ("properties", "patternProperties"):
                named = part.get(key)
                for name, inner_part in named.items() if isinstance(named, dict) else ():
                    members[f"{key} {name}"].append(inner_part)
            for key in _OTHERS:
                members[key].append(part.get(key))
            for i, item in enumerate(_listed(part.get("prefixItems"))):
                members[f"prefixItems {i}"].append(item)
        return num_patterns, multiples, [*places, *members.values()]

    def _meant(self, part: object) -> object:
        """What a part that is nothing but a reference means, in one step."""
        return self._target(part["$ref"]) if isinstance(part, dict) and part.keys() == {"$ref"} else part

    def _target(self, reference: object) -> object:
        """What a reference inside the schema means; None if there is nothing."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        target: object = self._root
        for name in reference[1:].split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        return target


def _listed(value: object) -> list[object]:
    return cast(list[object], value) if isinstance(value, list) else []


def _common(multiples: Iterable[object]) -> int:
    """The least common multiple, without zeros at its end; of numbers with decimals, of their digits."""
    try:
        numbers = [Decimal(str(number)) for number in multiples if isinstance(number, int | float)]
        exponents = [int(number.as_tuple().exponent) for number in numbers]
        scaled = [int(abs(number.scaleb(-min(exponents)))) for number in numbers]
    except (InvalidOperation, OverflowError, ValueError, TypeError):
        return 0  # the library refuses what is no number
    common = math.lcm(*scaled) if scaled else 0
    while common and common % 10 == 0:
        common //= 10
    return common
