"""How the model of a checkpoint writes calls and reasoning: read off its chat template, once, at the start."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from weft.server.formats import harmony, json_calls, pythonic_calls, reasoning, xml_calls
from weft.server.formats.parser import ToolFormat
from weft.server.formats.reasoning import ReasoningFormat

logger = logging.getLogger(__name__)

TOOL_FORMATS: Final[tuple[ToolFormat, ...]] = (
    harmony.HARMONY,
    xml_calls.QWEN3_CODER,
    xml_calls.GLM,
    pythonic_calls.PYTHONIC,
    *json_calls.ALL,
)
"""The first that finds its signs in the template is taken."""


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """What a model's outputs consist of.

    Attributes:
        tools: How calls are written; None: the template shows no tools.
        reasoning: How reasoning is written; None: there is none, or `tools` reads it as well.
        template: The source of the chat template, whose variables switch reasoning.
        tools_read_all: Every output has the form that `tools` reads, calls or not.
        reasoning_ids: Tokens that begin and end reasoning; None where they are written with several, in one of several
            ways, so that nobody can tell from ids how long it has been.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    template: str
    tools_read_all: bool = False
    reasoning_ids: tuple[int, int] | None = None


def choose_formats(template: str, tool_format: str, added_id: Callable[[str], int | None]) -> OutputFormats:
    """Choose by the template; `tool_format` names one instead, unless it is "auto"; added_id finds added tokens."""
    if tool_format == "auto":
        tools = next((known for known in TOOL_FORMATS if known.is_used_by(template)), None)
    else:
        tools = next(known for known in TOOL_FORMATS if known.name == tool_format)
    is_harmony = tools is harmony.HARMONY
    thinks = None if is_harmony else reasoning.reasoning_format(template)
    begin_id, end_id = (added_id(thinks.begin), added_id(thinks.end)) if thinks else (None, None)
    ids = None if begin_id is None or end_id is None else (begin_id, end_id)
    formats = OutputFormats(tools, thinks, template, is_harmony, ids)
    logger.info("tool calls: %s; reasoning: %s", tools.name if tools else "none", thinks.name if thinks else "none")
    return formats
