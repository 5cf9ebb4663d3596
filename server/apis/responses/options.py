"""Reads what a caller wants of responses: tools, structure and reasoning of a new one, what is shown of stored ones.

The fields of a body are flat where those of chat completions nest.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from starlette.requests import Request

from weft.server.apis.responses.mcp_tools import MCP_MEMBERS, NO_HOSTED, HostedTools
from weft.server.apis.responses.schema import FlatReference, Includable, ResponseBody, ResponseTool, ResponseToolChoice
from weft.server.errors import InvalidRequestError, UnsupportedParameterError, UnsupportedValueError, shown
from weft.server.formats.detection import OutputFormats
from weft.server.task.read_body import MAX_LOGPROBS
from weft.server.task.schema import FunctionDefinition, GrammarDefinition
from weft.server.task.structured_output import Structure, json_structure
from weft.server.task.task import OutputWishes
from weft.server.task.template_options import Thinking, checked_kwargs, prompt_end, thinking_of
from weft.server.task.tool_use import (
    MAX_TOOLS,
    Choice,
    HostedTool,
    ToolUse,
    check_declared,
    check_functions,
    chosen_word,
    custom_function,
    use_of,
)
from weft.server.task.validation import check_range, required
from weft.server.text.chat_template import TemplateOptions
from weft.server.text.text_tokenizer import TextTokenizer

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


def read_wishes(body: ResponseBody, formats: OutputFormats, hosted: HostedTools = NO_HOSTED) -> OutputWishes:
    """Read the fields about tools, structure and reasoning. `hosted` holds what MCP servers add to the tools.

    Raises:
        InvalidRequestError: One of them is wrong.
        UnsupportedParameterError: There are tools, but the model has none, or its format of calls is not known.
    """
    use = _tool_use(body, hosted)
    if use is not None and formats.tools is None:
        raise UnsupportedParameterError(f"tools cannot be used: {formats.no_tools}", param="tools")
    effort = body.reasoning.effort if body.reasoning else None
    thinking = thinking_of(effort, None, formats, "reasoning.effort") if effort else Thinking()
    return OutputWishes(use, _structure(body), thinking)


def template_options(body: ResponseBody, wishes: OutputWishes, tokenizer: TextTokenizer) -> TemplateOptions:
    """The variables of the chat template. The prompt always ends where the model answers."""
    variables: dict[str, Any] = {**wishes.variables, **checked_kwargs(body.chat_template_kwargs)}
    if body.text and body.text.verbosity and "verbosity" in tokenizer.template_variables:
        variables["verbosity"] = body.text.verbosity
    return prompt_end(None, None, variables)


def max_output_tokens(body: ResponseBody) -> int | None:
    """Most tokens of the output; None: as many as fit."""
    if body.prompt_cache_options and body.prompt_cache_options.prewarm:
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


def _tool_use(body: ResponseBody, hosted: HostedTools) -> ToolUse | None:
    if not body.tools:  # an agent without tools sends an empty list
        if body.tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice needs tools, got none", param="tool_choice")
        return None
    own = {i: tool for i, tool in enumerate(body.tools) if tool.type != "mcp"}
    functions = [_function(tool, f"tools[{i}]") for i, tool in own.items()]
    paths = [f"tools[{i}].{'parameters' if tool.type == 'function' else 'format'}" for i, tool in own.items()]
    if functions or len(body.tools) > MAX_TOOLS:
        check_functions(functions, "tools", paths)
    kinds = {function.name: tool.type for function, tool in zip(functions, own.values(), strict=True)}
    by_name = {each.function.name: each.tool for each in hosted.functions}
    labels = sorted({tool.server_label or "" for tool in body.tools if tool.type == "mcp"})
    choice = _chosen(body.tool_choice, kinds, by_name, labels)
    if hosted.is_later:
        names = frozenset(kinds) | frozenset(by_name) if choice.is_one else choice.names
        choice = Choice(names if hosted.may_call else names - by_name.keys())
    elif choice.is_required and not choice.names:
        raise InvalidRequestError("tool_choice requires a call, but no MCP server listed a tool", param="tool_choice")
    use = use_of(
        [*functions, *(each.function for each in hosted.functions)],
        [*paths, *(f"{each.tool.label}.{each.tool.name}.input_schema" for each in hosted.functions)],
        kinds,
        choice,
        is_parallel=body.parallel_tool_calls is not False,
    )
    return replace(use, hosted=by_name) if use and by_name else use


def _function(tool: ResponseTool, at: str) -> FunctionDefinition:
    if tool.type not in ("function", "custom"):
        raise UnsupportedValueError(
            f"{at}.type must be 'function', 'custom' or 'mcp': this server does not host {shown(tool.type)}",
            param=f"{at}.type",
        )
    for member in MCP_MEMBERS:
        if getattr(tool, member) is not None:
            raise InvalidRequestError(
                f"{at}.{member} is only a member of tools of type mcp, got {shown(tool.type)}", param=f"{at}.{member}"
            )
    name = required(tool.name, f"{at}.name")
    if tool.type == "function":
        return FunctionDefinition(
            name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
    grammar = None
    if tool.format is not None and tool.format.type == "grammar":
        required(tool.format.syntax, f"{at}.format.syntax")
        required(tool.format.definition, f"{at}.format.definition")
        grammar = GrammarDefinition.model_validate(tool.format.model_dump(include={"syntax", "definition"}))
    return custom_function(name, tool.description, grammar, f"{at}.format")


def _chosen(
    choice: str | ResponseToolChoice | None,
    kinds: dict[str, str],
    hosted: Mapping[str, HostedTool],
    labels: Sequence[str],
) -> Choice:
    if choice is None or isinstance(choice, str):
        return chosen_word(choice, {**kinds, **dict.fromkeys(hosted, "mcp")})
    if choice.type != "allowed_tools":
        is_one = choice.name is not None  # not so if all tools of a server are meant
        return Choice(_names(choice, kinds, hosted, labels, "tool_choice"), is_required=True, is_one=is_one)
    if not choice.tools:
        at = "tool_choice.tools"
        raise InvalidRequestError(f"{at} must name at least one tool, got none", param=at)
    names = [_names(each, kinds, hosted, labels, f"tool_choice.tools[{i}]") for i, each in enumerate(choice.tools)]
    return Choice(frozenset().union(*names), required(choice.mode, "tool_choice.mode") == "required")


def _names(
    reference: FlatReference, kinds: dict[str, str], hosted: Mapping[str, HostedTool], labels: Sequence[str], at: str
) -> frozenset[str]:
    """The tools that a reference means; more than one only if it names an MCP server alone."""
    if reference.type == "mcp":
        label = required(reference.server_label, f"{at}.server_label")
        check_declared(label, labels, f"{at}.server_label")
        of_server = {name: tool.name for name, tool in hosted.items() if tool.label == label}
        if reference.name is not None and of_server:  # empty if the server did not list its tools
            check_declared(reference.name, [*of_server.values()], f"{at}.name")
        return frozenset(name for name, known in of_server.items() if reference.name in (None, known))
    if reference.type not in ("function", "custom"):
        raise UnsupportedValueError(
            f"{at}.type must be 'function', 'custom' or 'mcp', got {shown(reference.type)}", param=f"{at}.type"
        )
    name = required(reference.name, f"{at}.name")
    check_declared(name, [known for known, kind in kinds.items() if kind == reference.type], f"{at}.name")
    return frozenset({name})


def _structure(body: ResponseBody) -> Structure | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_structure({"type": "object"}, "text.format")
    required(wanted.name, "text.format.name")
    schema = required(wanted.schema_, "text.format.schema")
    return json_structure(schema, "text.format.schema", is_lenient=not wanted.strict)


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
