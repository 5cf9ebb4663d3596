"""Opens an answer whose grammar the engine may refuse: parts of schemas become free until the engine takes it.

The server leaves out of schemas what it knows that grammars cannot enforce, and `Repair` finds what else the engine
refuses. The outcome is remembered, for an agent sends the same tools with every turn.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import msgspec

from weft.engine.wire.messages import MAX_GRAMMAR_BYTES, Guidance
from weft.server.errors import GrammarError, JsonSchemaError
from weft.server.generate.answer import Answer
from weft.server.generate.repair import Repair
from weft.server.json_schema.keywords import FREE_OBJECT
from weft.server.json_schema.shrink import MAX_SCHEMA_BYTES
from weft.server.models.engine_client import EngineClient
from weft.server.task.enforced import fitted_tools, reported
from weft.server.task.structured_output import schema_structure
from weft.server.task.task import OutputWishes
from weft.server.task.validation import renamed

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
