"""Detects how a model writes tool calls and reasoning, from its chat template, once at the start.

A new format is one more entry here, and its name in `ToolFormatName` of `server/settings.py`.
"""

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
    *xml_calls.ALL,
    *pythonic_calls.ALL,
    *json_calls.ALL,
)
"""In order of preference: the first format whose signs are in the template is used."""


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """How a model writes its outputs.

    Attributes:
        tools: How calls are written; None: the template shows no tools.
        reasoning: How reasoning is written; None: there is none, or `tools` parses it too.
        template: The source of the chat template. Its variables switch reasoning.
        tools_read_all: `tools` parses every output, even without calls.
        reasoning_ids: The token that begins reasoning and the one that ends it. None: a marker is several tokens, which
            may vary, so ids alone do not tell how long the reasoning is.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    template: str
    tools_read_all: bool = False
    reasoning_ids: tuple[int, int] | None = None


def choose_formats(template: str, tool_format: str, added_id: Callable[[str], int | None]) -> OutputFormats:
    """Choose the formats by the template.

    Args:
        template: The source of the chat template.
        tool_format: "auto", or the name of the tool format to use instead.
        added_id: Returns the id of an added token; None if there is no such token.
    """
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
