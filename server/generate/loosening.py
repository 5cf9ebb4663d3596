"""Opens an answer whose grammar the engine may refuse: what is not strict is loosened until the engine takes it.

The server leaves out of schemas what it knows that grammars cannot enforce. The engine's compiler knows more: that no
value is left where two schemas meet, or that a grammar takes too long. It refuses the whole grammar, and names a line.
So the schema of that line is loosened by a step, and the answer is opened again, a few times at most.
"""

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from weft.engine.wire.messages import Guidance
from weft.server.errors import GrammarError, JsonSchemaError
from weft.server.formats.parser import Tool
from weft.server.generate.answer import Answer
from weft.server.json_schema.keywords import FREE_OBJECT
from weft.server.json_schema.shrink import looser
from weft.server.models.engine_client import EngineClient
from weft.server.task.enforced import freed, reported
from weft.server.task.structured_output import loose_structure
from weft.server.task.task import OutputWishes

MAX_STEPS = 6
"""Most grammars that are tried after the first. The last one has nothing left that could be refused."""
_FAULT_LINE = re.compile(r"\bat (\d{1,7})\(\d+\)")
_RULE = re.compile(r"(?:arguments|call)_(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Step:
    """Looser wishes, and the paths of what is no longer enforced."""

    wishes: OutputWishes
    lost: list[str]


async def open_loosening(
    answer: Answer, client: EngineClient, wishes: OutputWishes, guide: Callable[[OutputWishes], Awaitable[Guidance]]
) -> None:
    """Let the engine accept an answer, with looser schemas if it refuses the grammar.

    Args:
        wishes: Those that the answer's grammar was made of.
        guide: Makes the guidance of other wishes.

    Raises:
        ApiError: As `Answer.open` does. If the grammar is refused, the error names the field that asked for it.
    """
    for num_steps in range(MAX_STEPS + 1):
        try:
            return await answer.open(client)
        except GrammarError as error:
            tool = _refused_tool(wishes, answer.guidance.grammar or "", error.message)
            step = _looser_wishes(wishes, tool, is_last=num_steps >= MAX_STEPS - 1)
            if step is None or num_steps == MAX_STEPS:
                raise _named(error, wishes, tool) from None
        wishes = step.wishes
        answer.lost += step.lost
        answer.guide(await guide(wishes))


def _refused_tool(wishes: OutputWishes, grammar: str, fault: str) -> Tool | None:
    """The tool in whose rules the engine's message finds a fault; None if it names none."""
    place = _FAULT_LINE.search(fault)
    if wishes.use is None or place is None or not grammar.startswith("{"):
        return None
    lines = str(json.loads(grammar)["grammars"][0].get("lark_grammar", "")).splitlines()
    number = int(place[1])
    rule = _RULE.match(lines[number - 1]) if 0 < number <= len(lines) else None
    index = int(rule[1]) if rule else len(wishes.use.tools)
    return wishes.use.tools[index] if index < len(wishes.use.tools) else None


def _looser_wishes(wishes: OutputWishes, refused: Tool | None, *, is_last: bool) -> _Step | None:
    """Wishes that enforce less: of the refused tool, or of every schema if it is not known which; None: all is free.

    Args:
        is_last: Free everything that is not strict.
    """
    if refused is not None and refused.is_strict:
        return None
    lost: list[str] = []
    use, structure = wishes.use, wishes.structure
    if use is not None:
        tools = list(use.tools)
        for i, tool in enumerate(tools):
            if tool.is_strict or not (is_last or refused is None or tool is refused):
                continue
            schema = FREE_OBJECT if is_last else looser(tool.parameters)
            if schema is not None and schema != tool.parameters:
                tools[i] = replace(tool, parameters=schema)
                lost += reported(tool.name, tool.at, [freed(schema)])
        use = replace(use, tools=tools)
    if structure is not None and structure.loose is not None and (is_last or refused is None):
        schema = looser(structure.loose)
        if schema is not None:
            paths = reported("the answer", structure.param, [freed(schema)])
            structure = loose_structure(schema, structure.param, structure.lost)
            lost += paths
    return _Step(replace(wishes, use=use, structure=structure), lost) if lost else None


def _named(error: GrammarError, wishes: OutputWishes, tool: Tool | None) -> GrammarError:
    """The error, with the field that asked for the grammar."""
    structure, use = wishes.structure, wishes.use
    if tool is not None and tool.at:
        return JsonSchemaError(f"{tool.at}: {error.message}", param=tool.at)
    is_schema = structure.is_schema if structure else use is not None
    param = structure.param if structure else use.param if use else None
    kind = JsonSchemaError if is_schema else GrammarError
    return kind(f"{param}: {error.message}", param=param)
