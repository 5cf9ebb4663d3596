"""Detects how a model writes tool calls and reasoning, from its chat template, once at the start.

A new format is one more entry here, and its name in `ToolFormatName` of `server/settings.py`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from weft.server.formats import harmony, json_calls, json_families, pythonic_calls, reasoning, xml_families
from weft.server.formats.families import functionary_calls, gemma_calls, minimax_calls
from weft.server.formats.parser import ToolFormat
from weft.server.formats.reasoning import ReasoningFormat
from weft.server.formats.trial import Render, reading_format, shown_reasoning, shows_tools

logger = logging.getLogger(__name__)

TOOL_FORMATS: Final[tuple[ToolFormat, ...]] = (
    harmony.HARMONY,
    *xml_families.ALL,
    *pythonic_calls.ALL,
    gemma_calls.GEMMA4,
    minimax_calls.MINIMAX_M3,
    functionary_calls.FUNCTIONARY,
    *json_families.ALL,
    *json_calls.ALL,
)
"""In order of preference, where several formats read what a template writes equally well."""

NOT_SHOWN: Final = "the chat template of this model shows no tools"
UNKNOWN: Final = (
    "the format in which this model writes calls is not known; start the server with --tool-format to name it"
)


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """How a model writes its outputs.

    Attributes:
        tools: How calls are written; None: see `no_tools`.
        reasoning: How reasoning is written; None: there is none, or `tools` parses it too.
        template: The source of the chat template. Its variables switch reasoning.
        tools_read_all: `tools` parses every output, even without calls.
        reasoning_ids: The token that begins reasoning and the one that ends it. None: a marker is several tokens, which
            may vary, so ids alone do not tell how long the reasoning is.
        no_tools: Why tools cannot be used, as the client is told; "" if they can.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    template: str
    tools_read_all: bool = False
    reasoning_ids: tuple[int, int] | None = None
    no_tools: str = ""


def choose_formats(
    template: str, tool_format: str, added_id: Callable[[str], int | None], render: Render
) -> OutputFormats:
    """Choose the formats by what the template writes; by its source only where it writes no calls or no reasoning.

    Args:
        template: The source of the chat template; "" if there is none.
        tool_format: "auto", or the name of the tool format to use instead.
        added_id: Returns the id of an added token; None if there is no such token.
        render: Renders with that template.
    """
    shows = bool(template) and shows_tools(render)
    tools, missing = _tool_format(template, shows, render)
    if tool_format != "auto":
        tools, missing = next(known for known in TOOL_FORMATS if known.name == tool_format), ""
    thinks = None if tools is harmony.HARMONY else _reasoning_format(template, render)
    begin_id, end_id = (added_id(thinks.begin), added_id(thinks.end)) if thinks else (None, None)
    ids = None if begin_id is None or end_id is None else (begin_id, end_id)
    name = tools.name if tools else "not known, --tool-format names one" if missing == UNKNOWN else "none"
    logger.info("tool calls: %s; reasoning: %s", name, thinks.name if thinks else "none")
    if tools and template and not shows:
        logger.warning("the chat template does not show tools to the model: they are put into its system message")
    return OutputFormats(tools, thinks, template, tools is not None and tools.reads_all, ids, missing)


def _tool_format(template: str, shows: bool, render: Render) -> tuple[ToolFormat | None, str]:
    """The format of calls; None and the reason if there is none."""
    reads, writes = reading_format(render, TOOL_FORMATS)
    if reads is None and not writes:
        reads = next((known for known in TOOL_FORMATS if known.is_used_by(template)), None)
    return reads, "" if reads else UNKNOWN if shows or writes else NOT_SHOWN


def _reasoning_format(template: str, render: Render) -> ReasoningFormat | None:
    return shown_reasoning(render, template, reasoning.ALL) or reasoning.reasoning_format(template)
