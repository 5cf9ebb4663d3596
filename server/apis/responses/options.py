"""Reads what a caller wants of responses: structure and reasoning of a new one, what is shown of stored ones.

The fields of a body are flat where those of chat completions nest.
"""

import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any, get_args

from starlette.requests import Request

from weft.server.apis.responses.answers import ResponseObject
from weft.server.apis.responses.mcp_tools import NO_HOSTED, HostedTools
from weft.server.apis.responses.schema import Includable, ResponseBody, ResponseTool
from weft.server.apis.responses.tools import read_tools
from weft.server.errors import InvalidRequestError, UnsupportedParameterError, shown
from weft.server.formats.detection import OutputFormats
from weft.server.task.read_body import MAX_LOGPROBS
from weft.server.task.structured_output import Structure, json_structure
from weft.server.task.task import OutputWishes, Task
from weft.server.task.template_options import Thinking, checked_kwargs, prompt_end, thinking_of
from weft.server.task.validation import NOTHING, OFF, REFUSED_EVERYWHERE, Refused, check_range, required
from weft.server.text.chat_template import TemplateOptions
from weft.server.text.text_tokenizer import TextTokenizer

_ABSENT = (
    *("prompt", "prompt_cache_options.comparison_response_id", "access_programs", "image", "background_options"),
    *("messages", "response_format", "reasoning_effort", "max_tokens", "max_completion_tokens", "kv_transfer_params"),
    *("prompt_logprobs", "logprob_token_ids", "length_penalty", "early_stopping", "truncate_prompt_tokens"),
)
_SWITCHES = (
    *("prewarm", "return_token_ids", "return_prompt_text", "use_beam_search"),
    "stream_options.continuous_usage_stats",
)
REFUSED: Refused = {
    **REFUSED_EVERYWHERE,
    **dict.fromkeys(_ABSENT, NOTHING),
    **dict.fromkeys(_SWITCHES, OFF),
    "context_management": (None, []),
    "n": (None, 1),
}
REFUSED_IN_COMPACT: Refused = {
    **dict.fromkeys(("conversation", "image"), NOTHING),
    **dict.fromkeys(("stream", "prompt_cache_options.prewarm"), OFF),
}
ACCEPTED = frozenset(
    {
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "text.verbosity"),
        *("reasoning.summary", "reasoning.generate_summary", "reasoning.mode"),
    }
)
"""Fields that are validated and reported but have no effect."""

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


def read_wishes(
    body: ResponseBody, formats: OutputFormats, hosted: HostedTools = NO_HOSTED, *, strict: bool = False
) -> OutputWishes:
    """Read the fields about tools, structure and reasoning. `hosted` holds what MCP servers add to the tools.

    If `strict`, a tool that this server does not host is refused; if not, it is left out.

    Raises:
        InvalidRequestError: One of them is wrong.
        UnsupportedParameterError: There are tools, but the model has none, or its format of calls is not known.
    """
    use, left_out = read_tools(body, hosted, strict=strict)
    if use is not None and formats.tools is None:
        raise UnsupportedParameterError(f"tools cannot be used: {formats.no_tools}", param="tools")
    effort = body.reasoning.effort if body.reasoning else None
    thinking = thinking_of(effort, None, formats, "reasoning.effort") if effort else Thinking()
    return OutputWishes(use, _structure(body), thinking, left_out=left_out)


def template_options(body: ResponseBody, wishes: OutputWishes, tokenizer: TextTokenizer) -> TemplateOptions:
    """The variables of the chat template. The prompt always ends where the model answers."""
    variables: dict[str, Any] = {**wishes.variables, **checked_kwargs(body.chat_template_kwargs)}
    if body.text and body.text.verbosity and "verbosity" in tokenizer.template_variables:
        variables["verbosity"] = body.text.verbosity
    return prompt_end(None, None, variables)


def is_prewarm(body: ResponseBody) -> bool:
    """Whether the prompt is computed and nothing is generated; clients probe a server so, too."""
    return body.generate is False or bool(body.prompt_cache_options and body.prompt_cache_options.prewarm)


def max_output_tokens(body: ResponseBody) -> int | None:
    """Most tokens of the output; None: as many as fit."""
    if is_prewarm(body):
        return 0
    if body.max_output_tokens is not None:
        check_range("max_output_tokens", body.max_output_tokens, 1, None)
    if body.max_tool_calls is not None:
        check_range("max_tool_calls", body.max_tool_calls, 1, None)
    return body.max_output_tokens


def num_logprobs(body: ResponseBody) -> int | None:
    """Number of most probable alternatives per token; None if logprobs were not requested.

    Raises:
        InvalidRequestError: The number is out of range, or logprobs are not included.
    """
    top = check_range("top_logprobs", body.top_logprobs or 0, 0, MAX_LOGPROBS)
    if LOGPROBS in (body.include or ()):
        return top
    if top:
        raise InvalidRequestError(f"top_logprobs is only allowed when include holds {LOGPROBS}", param="top_logprobs")
    return None


def _structure(body: ResponseBody) -> Structure | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_structure({"type": "object"}, "text.format")
    schema = required(wanted.schema_, "text.format.schema")
    return json_structure(schema, f"text.format{wanted.schema_at}", strict=wanted.strict)


def new_response(body: ResponseBody, conversation: str | None, task: Task) -> ResponseObject:
    """The response before its output: what the body chose, with the values that were used where it chose nothing."""
    choice, text = body.tool_choice, body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    return ResponseObject(
        id=f"resp_{secrets.token_hex(24)}",
        created_at=int(time.time()),
        background=bool(body.background),
        conversation=None if conversation is None else {"id": conversation},
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=task.name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning.model_dump(exclude_none=True) if body.reasoning else {},
        safety_identifier=body.safety_identifier,
        service_tier=task.service.tier,
        store=body.store is not False,
        temperature=task.sampling.temperature,
        text={"format": {"type": "text"}, **text},
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(exclude_none=True) if choice else "auto",
        tools=[_shown_tool(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=task.sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _shown_tool(tool: ResponseTool) -> dict[str, Any]:
    required = {"parameters": tool.parameters, "strict": tool.strict} if tool.type == "function" else {}
    secrets_ = {"headers", "authorization"}  # for the tool's server only: they are neither shown nor stored
    return {**tool.model_dump(exclude_none=True, exclude=secrets_), **required}


def read_include(request: Request) -> frozenset[str]:
    """The values of the query `include`, which SDKs send as `include[]`.

    Log-probabilities are shown where they were asked for when the response was made. What belongs to hosted tools,
    of which there are none, adds nothing.

    Raises:
        InvalidRequestError: There is no such value.
    """
    query = request.query_params
    values = [*query.getlist("include"), *query.getlist("include[]")]
    for value in values:
        if value not in get_args(Includable):
            bound = ", ".join(get_args(Includable))
            raise InvalidRequestError(f"include must be among {bound}, got {shown(value)}", param="include")
    return frozenset(values)


def with_included(
    items: Iterable[dict[str, Any]], include: frozenset[str], seal: Callable[[str, str], str]
) -> list[dict[str, Any]]:
    """Stored items with what is to be included: reasoning is sealed if wanted."""
    if ENCRYPTED not in include:
        return list(items)
    return [_sealed(item, seal) if item["type"] == "reasoning" and item.get("content") else item for item in items]


def _sealed(item: dict[str, Any], seal: Callable[[str, str], str]) -> dict[str, Any]:
    return {**item, "encrypted_content": seal("reasoning", "".join(part.get("text") or "" for part in item["content"]))}
