"""Detects how a model writes tool calls and reasoning, from its chat template, once at the start.

A template is foreign code, and what it writes is the only certain sign of what its model was trained on. So it renders
short chats with a question, tools, calls and reasoning that are made up here, and what stands behind the question is
compared with what a format reads. A chat that the template refuses shows nothing.

A new format is one more entry here, and its name in `ToolFormatName` of `server/settings.py`.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from weft.server.formats import harmony, json_calls, json_families, pythonic_calls, reasoning, xml_families
from weft.server.formats.families import functionary_calls, gemma_calls, minimax_calls
from weft.server.formats.parser import Kind, Tool, ToolFormat
from weft.server.formats.reasoning import ReasoningFormat
from weft.server.text.chat_template import ChatTemplateError, TemplateOptions
from weft.server.text.text_tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

MAX_TRIAL_S: Final = 10.0
Message = dict[str, Any]
Render = Callable[[Sequence[Message], Sequence[Mapping[str, object]], bool], str]
"""Renders messages and tools, with a prompt for the next answer or without; raises ChatTemplateError."""

_NAMES: Final = "find_hotel", "read_clock"
_ARGUMENTS: Final[tuple[dict[str, object], ...]] = ({"city": 'Bad "Ischl"', "days": 3}, {"zone": "Asia/Tokyo"})
_TYPES: Final[tuple[dict[str, str], ...]] = ({"city": "string", "days": "integer"}, {"zone": "string"})
PLAIN_ID: Final = "{index:09}"
_QUESTION: Final[Message] = {"role": "user", "content": "Where may I sleep?"}
_CONTENT: Final = "I shall look."
_REASONING: Final = "Three nights are asked for."


def _schema(types: Mapping[str, str]) -> dict[str, Any]:
    properties = {key: {"type": name, "description": f"A {key}."} for key, name in types.items()}
    return {"type": "object", "properties": properties, "required": list(types)}


TOOLS: Final = tuple(Tool(name, _schema(types)) for name, types in zip(_NAMES, _TYPES, strict=True))
_SHOWN_TOOLS: Final = tuple(
    {
        "type": "function",
        "function": {"name": tool.name, "description": f"Calls {tool.name}.", "parameters": tool.parameters},
    }
    for tool in TOOLS
)


def renderer(tokenizer: TextTokenizer) -> Render:
    """Render with the chat template of a checkpoint, for MAX_TRIAL_S at most: a slow one must not delay the start."""
    end_time = time.monotonic() + MAX_TRIAL_S

    def render(messages: Sequence[Message], tools: Sequence[Mapping[str, object]], has_prompt: bool) -> str:
        if time.monotonic() > end_time:
            raise ChatTemplateError("the chat template is too slow to be tried")
        variables = {"tools": list(tools)} if tools else {}
        options = TemplateOptions(has_prompt, repairs=False, variables=variables)
        return "".join(tokenizer.render_chat(list(messages), options))

    return render


def shows_tools(render: Render) -> bool:
    """Tell whether the template looks at tools: the prompt is another one, or one is refused.

    Also true if the template refuses all of these chats, and so shows nothing about itself.
    """
    refuses = True
    for messages in ([_QUESTION], [{"role": "system", "content": "Be brief."}, _QUESTION]):
        plain, told = _rendered(render, messages, ()), _rendered(render, messages, _SHOWN_TOOLS)
        if plain != told:
            return True
        refuses &= plain is None and told is None
    return refuses


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """One answer with calls as a template writes it, with what stands behind it; `called` counts the calls in it."""

    text: str
    called: int

    def leftover(self, format: ToolFormat) -> int | None:
        """Number of characters that the format does not read as part of a call; None: it does not read the calls."""
        parser = format.parser(TOOLS)
        pieces = [*parser.feed(self.text), *parser.finish()]
        calls: list[tuple[str, str]] = []
        content = ""
        for kind, text in pieces:
            if kind is Kind.CALL:
                calls.append((text, ""))
            elif kind is Kind.ARGUMENTS:
                calls[-1] = calls[-1][0], calls[-1][1] + text
            else:
                content += text
        try:
            read = [(name, json.loads(arguments)) for name, arguments in calls]
        except ValueError:
            return None
        return len(content) if read == list(zip(_NAMES, _ARGUMENTS, strict=True))[: self.called] else None


def written_calls(render: Render, call_id: str) -> list[WrittenCalls]:
    """What the template writes of answers with several calls, with one, and with content beside one.

    Args:
        call_id: The form of the ids, as in `ToolFormat`.
    """
    calls = _calls(call_id)
    found = []
    for content, asked in ((None, calls), (None, calls[:1]), (_CONTENT, calls[:1])):
        text = _answer(render, {"role": "assistant", "content": content, "tool_calls": asked})
        called = sum(name in text for name in _NAMES[: len(asked)])  # some write the first call alone
        if called:
            found.append(WrittenCalls(text, called))
    return found


def reading_format(render: Render, formats: Sequence[ToolFormat]) -> tuple[ToolFormat | None, bool]:
    """Find the format that reads the calls which the template writes; of several, what takes least of them for content.

    Returns:
        The first of the best formats, None if there is none; and whether the template writes calls at all.
    """
    best: tuple[int, ToolFormat] | None = None
    writes = False
    for call_id in dict.fromkeys(format.call_id or PLAIN_ID for format in formats):
        written = written_calls(render, call_id)
        writes |= bool(written)
        for format in formats if written else ():
            if format.call_id in ("", call_id):
                size = _total(calls.leftover(format) for calls in written)
                if size is not None and (best is None or size < best[0]):
                    best = size, format
    return best and best[1], writes


def _total(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def shown_reasoning(render: Render, template: str, formats: Sequence[ReasoningFormat]) -> ReasoningFormat | None:
    """Find the format whose markers a template writes around the reasoning of an earlier answer.

    If a format has markers of the answer as well, they have to be there, and its sign in the source `template`.
    """
    for answer in ({"content": _CONTENT}, {"content": None, "tool_calls": _calls(PLAIN_ID)[:1]}):
        messages = [_QUESTION, {"role": "assistant", "reasoning_content": _REASONING, **answer}]
        before, found, after = (_rendered(render, messages, _SHOWN_TOOLS) or "").partition(_REASONING)
        for format in formats if found else ():
            if not (before.rstrip().endswith(format.begin.rstrip()) and after.lstrip().startswith(format.end.lstrip())):
                continue
            shows_answer = format.sign in template and (_CONTENT not in after or format.answer_begin in after)
            if shows_answer or not format.answer_begin:
                return format
    return None


def _answer(render: Render, answer: Message) -> str:
    """What the template writes of an answer, without what it writes to ask for one; "" if it refuses."""
    whole = _rendered(render, [_QUESTION, answer], _SHOWN_TOOLS) or ""
    prompt = _rendered(render, [_QUESTION], _SHOWN_TOOLS, True)
    if prompt and whole.startswith(prompt):
        return whole.removeprefix(prompt)
    return whole.partition(str(_QUESTION["content"]))[2]  # the prompt begins reasoning, for example


def _calls(call_id: str) -> list[Message]:
    return [
        {
            "id": call_id.format(index=index, name=name),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, (name, arguments) in enumerate(zip(_NAMES, _ARGUMENTS, strict=True))
    ]


def _rendered(
    render: Render, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], has_prompt: bool = False
) -> str | None:
    try:
        return render(messages, tools, has_prompt)
    except ChatTemplateError:
        return None


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
