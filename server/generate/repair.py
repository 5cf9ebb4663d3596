"""Opens an answer whose grammar the engine may refuse: finds the parts of schemas it refuses, and frees just these.

The engine's compiler knows more than `loosen`: that no value is left where two schemas meet, or that a grammar takes
too long. It refuses the whole grammar. So grammars with fewer tools, then with fewer parts of one tool, are tried: half
as many each time. Everything is added in order, and what is refused beside the parts before it is freed. What a result
allows includes what the schema allows. The outcome is remembered, for an agent sends the same tools with every turn.
"""

import math
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from weft.engine.wire.messages import MAX_GRAMMAR_BYTES, Guidance
from weft.server.errors import GrammarError, JsonSchemaError, shown
from weft.server.formats.parser import Tool
from weft.server.generate.answer import Answer
from weft.server.json_schema.keywords import FREE_OBJECT, MAX_BOUND, MIN_BOUND, Schema
from weft.server.json_schema.shrink import MAX_SCHEMA_BYTES
from weft.server.models.engine_client import EngineClient
from weft.server.task.structured_output import fitted_tools, reported, schema_structure
from weft.server.task.task import OutputWishes
from weft.server.task.validation import renamed

MAX_TRIES = 160
MORE_TRIES = 16
"""Most grammars that are tried, and how many more for each tool. What is not known to be accepted then becomes free."""
MAX_S = 5.0
"""Longest search; a busy engine answers between two steps."""

_REASONS = (
    ("Unsatisfiable", "it leaves no value beside what else is asked there"),
    ("range|regex parse", f"bounds must be 0, or {MIN_BOUND} to {MAX_BOUND:.0e} from 0"),
    ("too many digits", f"multiples may be at most {2**32 - 1}, their points left out"),
    ("take too much", "repeats, lengths and patterns of one text take too much together"),
)
"""What the library's faults mean, each by a word in it."""

Refusal = Callable[[OutputWishes], Awaitable[str | None]]
"""Tells why the engine refuses the grammar of such wishes; None: it takes it."""

Path = tuple[str | int, ...]
"""A part of a schema: a keyword, or a schema inside one. Holds the keys and indices from the root on."""

_NAMED = ("patternProperties", "properties", "$defs")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
"""Keywords that hold a list of schemas."""
_LAST = ("additionalProperties", "patternProperties", "items", "properties", "prefixItems", "anyOf", "oneOf", "allOf",
         "$ref", "$defs")  # fmt: skip
"""These come after what bounds a value by itself, each before those that rely on it. So what is found to contradict the
parts before it is deep inside, and no bound is given up for it."""


class Repair:
    """One search. What it finds is in `wishes` and `lost`.

    Attributes:
        lost: Paths in the body of what is no longer enforced.
    """

    def __init__(self, wishes: OutputWishes, refusal: Refusal, begin: float) -> None:
        """Take wishes whose grammar is refused. The search ends MAX_S after `begin`, when it was sent."""
        self.wishes = wishes
        self.lost: list[str] = []
        self._refusal = refusal
        self._num_tries = 0
        self._end = begin + MAX_S
        self._fault = ""
        self._units = list(wishes.use.tools) if wishes.use else []
        self._num_tools = len(self._units)
        structure = wishes.structure
        if structure is not None and structure.schema is not None:
            self._units.append(Tool("the answer", structure.schema, structure.is_strict, structure.param))

    async def run(self) -> None:
        """Search.

        Raises:
            JsonSchemaError: A part of a strict schema is at fault; the error names it.
        """

        def fits(num_units: int) -> Awaitable[bool]:
            return self._is_taken(dict(enumerate(self._units[:num_units])))

        async for index in _refused(len(self._units), fits, is_refused=True):
            await self._take_apart(index)
        self.wishes = self._wishes(dict(enumerate(self._units)))

    async def _is_taken(self, units: Mapping[int, Tool]) -> bool:
        if self._is_over:
            return False
        self._num_tries += 1
        fault = await self._refusal(self._wishes(units))
        self._fault = fault or self._fault
        return fault is None

    @property
    def is_late(self) -> bool:
        """Whether the time was over, so that more may be free than needs to be."""
        return time.monotonic() > self._end

    @property
    def _is_over(self) -> bool:
        return self._num_tries >= MAX_TRIES + MORE_TRIES * len(self._units) or self.is_late

    def _wishes(self, units: Mapping[int, Tool]) -> OutputWishes:
        """Wishes for units by their indices."""
        use, given = self.wishes.use, self.wishes.structure
        tools = [unit for index, unit in units.items() if index < self._num_tools]
        use = replace(use, tools=tools) if use and tools else None
        structure, answer = given, units.get(self._num_tools)
        if given is not None and given.schema is not None:
            structure = None
            if answer is not None:
                structure = schema_structure(answer.parameters, given.param, is_strict=given.is_strict, lost=given.lost)
        return replace(self.wishes, use=use, structure=structure)

    async def _take_apart(self, index: int) -> None:
        """Free what is at fault in a unit, or the whole unit if it is accepted alone."""
        unit, parts = self._units[index], set[Path]()
        await self._add_parts(index, (), parts, set())
        if unit.is_strict and self._is_over:
            return  # it may not be at fault
        outer = [path for path in parts if not any(path[:i] in parts for i in range(len(path)))]
        paths = sorted(_written(unit.parameters, path) for path in outer)
        if unit.is_strict:
            name = f" (tool {shown(unit.name)})" if index < self._num_tools else ""
            at = f"{unit.at}{paths[0] if paths else ''}"
            why = next((reason for words, reason in _REASONS if re.search(words, self._fault)), self._fault)
            raise JsonSchemaError(f"{at} cannot be enforced by a grammar: {why}{name}", param=unit.at)
        free = FREE_OBJECT if index < self._num_tools else {}
        schema = _freed(unit.parameters, parts) if parts else free
        self._units[index] = replace(unit, parameters=schema)
        self.lost += reported(unit.name, unit.at, paths or [""])

    async def _add_parts(self, index: int, at: Path, lost: set[Path], waiting: set[Path]) -> None:
        """Add what is inside a part of a unit, and note in `lost` what has to be free; `waiting` comes later."""
        unit = self._units[index]
        parts = _inner_parts(unit.parameters, at)

        def fits_without(paths: Iterable[Path]) -> Awaitable[bool]:
            return self._is_taken({index: replace(unit, parameters=_freed(unit.parameters, {*lost, *waiting, *paths}))})

        def fits(end: int) -> Awaitable[bool]:
            return fits_without(parts[end:])

        async for found in _refused(len(parts), fits, is_refused=bool(at)):
            part, later = parts[found], parts[found + 1 :]
            if at and at[-1] in _LISTS and await fits_without([*parts[:found], *later]):
                lost.add(at)  # it contradicts the others of the list
                break
            inner = _inner_parts(unit.parameters, part)
            if inner and await fits_without(later + inner):
                await self._add_parts(index, part, lost, waiting | set(later))
            else:
                lost.add(part)


async def _refused(num: int, fits: Callable[[int], Awaitable[bool]], *, is_refused: bool) -> AsyncIterator[int]:
    """Indices of the parts of which each is refused beside those before it, which were freed when they were found.

    Args:
        fits: Whether so many parts are accepted.
        is_refused: All are known to be refused.
    """
    start = 0
    while start < num and (is_refused or not await fits(num)):
        end = num
        while end - start > 1:
            middle = (start + end) // 2
            start, end = (middle, end) if await fits(middle) else (start, middle)
        yield start
        start, is_refused = start + 1, False


def _inner_parts(schema: Schema, at: Path) -> list[Path]:
    """The parts one step below a part, or of the schema itself (an empty path), in an order in which they are added."""
    value: Any = schema
    for step in at:
        value = value[step]
    if isinstance(value, dict) and _is_schema(at):
        return [(*at, key) for key in sorted(value, key=lambda key: _LAST.index(key) if key in _LAST else -1)]
    if isinstance(value, dict | list) and at[-1] in (*_NAMED, *_LISTS):
        return [(*at, step) for step in (value if isinstance(value, dict) else range(len(value)))]
    return []


def _is_schema(at: Path) -> bool:
    """Whether at a path there is a schema; if not, it is a keyword that holds several, or a value."""
    is_schema = True
    for step in at:
        is_schema = not is_schema or step in ("additionalProperties", "items")
    return is_schema


def _freed(schema: Any, parts: Collection[Path], at: Path = ()) -> Any:
    """The schema without some of its parts. Members stay, and may then be anything."""
    if at and at in parts:
        return {}
    if not isinstance(schema, dict):
        return schema
    out: Schema = {}
    for key, value in schema.items():
        path = (*at, key)
        if key in _NAMED and isinstance(value, dict):
            is_free = path in parts
            if not (is_free and key == "patternProperties"):
                out[key] = {name: {} if is_free else _freed(part, parts, (*path, name)) for name, part in value.items()}
        elif path in parts:
            continue
        elif key in _LISTS and isinstance(value, list):
            out[key] = [_freed(part, parts, (*path, i)) for i, part in enumerate(value)]
        else:
            out[key] = _freed(value, parts, path) if key in ("additionalProperties", "items") else value
    opening = [key for key in ("additionalProperties", "patternProperties") if (*at, key) in parts]
    if opening or ((*at, "properties") in parts and "additionalProperties" not in out):
        out["additionalProperties"] = True
    return out


def _written(schema: Schema, at: Path) -> str:
    """A path as it is reported: `.properties.x.anyOf[1]`. That of a definition begins where the caller has it."""
    text = ""
    if at[:1] == ("$defs",) and len(at) > 1:
        definition = schema["$defs"][at[1]]
        text = definition.get("$comment", "") if isinstance(definition, dict) else ""
        at = at[2:]
    return text + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at)


MAX_REMEMBERED = 64
LATE_S = 300.0
"""How long an outcome holds that a busy engine left no time for: each turn of an agent would search anew."""
_ANYTHING = '{"grammars": [{"lark_grammar": "start: /(?s:.*)/"}]}'
_MAX_FITTINGS = 4

Guide = Callable[[OutputWishes], Awaitable[Guidance]]
"""Makes the guidance of wishes."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of a grammar: the one that is used instead, or why there is none.

    Attributes:
        until: When the search is to be made again (monotonic), because it ran out of time.
    """

    grammar: str | None
    lost: list[str]
    message: str = ""
    param: str | None = None
    until: float = math.inf


_Outcomes = OrderedDict[tuple[str, tuple[tuple[str, bool], ...]], _Outcome]
"""By the first grammar, which holds all schemas, and where each of these stands and whether it is strict."""
_outcomes: WeakKeyDictionary[EngineClient, _Outcomes] = WeakKeyDictionary()
"""By model; a model that is not served any more is forgotten."""


async def open_loosening(answer: Answer, client: EngineClient, wishes: OutputWishes, guide: Guide) -> None:
    """Let the engine accept an answer, with looser schemas if it refuses the grammar.

    Args:
        wishes: Those that the answer's grammar was made of.

    Raises:
        ApiError: As `Answer.open` does. If the grammar is refused, the error names the field that asked for it.
    """
    grammar, begin = answer.guidance.grammar, time.monotonic()
    units = [(tool.at, tool.is_strict) for tool in (wishes.use.tools if wishes.use else ())]
    units += [(wishes.structure.param, wishes.structure.is_strict)] if wishes.structure else []
    key, outcomes = (grammar or "", tuple(units)), _outcomes.setdefault(client, OrderedDict())
    known = outcomes.get(key)
    if known is not None and known.until < begin:
        known = None
    if known is None and (grammar is None or len(grammar) <= MAX_GRAMMAR_BYTES):
        try:
            return await answer.open(client)
        except GrammarError as error:
            known = await _mended(answer, client, wishes, guide, error, begin)
    elif known is None:
        known = await _fitted(answer, client, wishes, guide, begin)
    else:
        outcomes.move_to_end(key)
    outcomes[key] = known
    if len(outcomes) > MAX_REMEMBERED:
        outcomes.popitem(last=False)
    if known.grammar is None:
        raise JsonSchemaError(known.message, param=known.param)
    answer.lost += known.lost
    answer.guide(msgspec.structs.replace(answer.guidance, grammar=known.grammar))
    try:
        await answer.open(client)
    except GrammarError as error:
        outcomes.pop(key, None)
        raise named(error, wishes) from None


async def _fitted(answer: Answer, client: EngineClient, wishes: OutputWishes, guide: Guide, begin: float) -> _Outcome:
    """The outcome of a grammar that is too long: how much text a schema becomes depends on the format of calls."""
    grammar, most, lost = answer.guidance.grammar or "", MAX_SCHEMA_BYTES, list[str]()
    for _ in range(_MAX_FITTINGS):
        if wishes.use is None or len(grammar) <= MAX_GRAMMAR_BYTES:
            break
        most = most * MAX_GRAMMAR_BYTES * 9 // (len(grammar) * 10)
        tools, new = fitted_tools(wishes.use.tools, most)
        wishes = replace(wishes, use=replace(wishes.use, tools=tools))
        lost += [path for path in new if path not in lost]
        grammar = (await guide(wishes)).grammar or ""
    fault = await answer.refusal(client, grammar)
    if fault is None:
        return _Outcome(grammar, lost)
    made = await _mended(answer, client, wishes, guide, GrammarError(fault), begin)
    return replace(made, lost=[*lost, *made.lost])


async def _mended(
    answer: Answer, client: EngineClient, wishes: OutputWishes, guide: Guide, error: GrammarError, begin: float
) -> _Outcome:
    """The outcome of a grammar that the engine refused with this error; it was sent at `begin`."""

    async def refusal(wishes: OutputWishes) -> str | None:
        grammar = (await guide(wishes)).grammar
        return None if grammar is None else await answer.refusal(client, grammar)

    if await answer.refusal(client, _ANYTHING) is not None:  # it is no fault of the grammar
        raise named(error, wishes)
    repair = Repair(wishes, refusal, begin)
    try:
        await repair.run()
    except JsonSchemaError as found:
        return _Outcome(None, [], found.message, found.param)
    wished, paths = repair.wishes, repair.lost
    if not paths or await refusal(wished) is not None:
        wished, more = _free(wished)
        paths = [*paths, *more]
        if not paths or await refusal(wished) is not None:
            raise named(error, wishes)
    until = time.monotonic() + LATE_S if repair.is_late else math.inf
    return _Outcome((await guide(wished)).grammar, paths, until=until)


def _free(wishes: OutputWishes) -> tuple[OutputWishes, list[str]]:
    """Wishes in which everything is free that is not strict, and the paths of that, which the log is told."""
    use, structure, lost = wishes.use, wishes.structure, list[str]()
    if use is not None:
        loose = [tool for tool in use.tools if not tool.is_strict]
        lost += [path for tool in loose for path in reported(tool.name, tool.at, [""])]
        use = replace(use, tools=[t if t.is_strict else replace(t, parameters=FREE_OBJECT) for t in use.tools])
    if structure is not None and not structure.is_strict:
        lost += reported("the answer", structure.param, [""])
        structure = schema_structure({}, structure.param, is_strict=False)
    return replace(wishes, use=use, structure=structure), lost


def named(error: GrammarError, wishes: OutputWishes, names: Mapping[str, str] | None = None) -> GrammarError:
    """The error, with the field that asked for the grammar, and what `names` make of it (see `renamed`)."""
    structure, use = wishes.structure, wishes.use
    single = use.tools[0].at if use and len(use.tools) == 1 else use.param if use else None
    param = structure.param if structure else single
    kind = JsonSchemaError if (structure.schema if structure else use) is not None else GrammarError
    param = renamed(param, names or {}) if param else None
    return kind(f"{param}: {error.message}" if param else error.message, param=param)
