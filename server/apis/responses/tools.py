"""Reads the tools of a body of POST /v1/responses: functions, custom tools, namespaces of these, and MCP tools.

The functions of a namespace have qualified names for the model. Agents declare tools that only another server hosts,
such as web_search. These are left out of the prompt and reported, for the agent can work without them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.server.apis.responses import schema as wire
from weft.server.apis.responses.mcp_tools import MCP_MEMBERS, HostedFunction, HostedTools
from weft.server.errors import InvalidRequestError, UnsupportedValueError, shown
from weft.server.json_schema.loosen import loosened_arguments
from weft.server.task import tool_use
from weft.server.task.schema import FunctionDefinition, GrammarDefinition
from weft.server.task.structured_output import reported
from weft.server.task.validation import required
from weft.server.text.declared import unhosted

_CALLED_BY_NAME = ("function", "custom")
_SCHEMAS = {"function": "parameters", "custom": "format"}
"""The member that says what a call may hold."""


@dataclass(frozen=True, slots=True)
class _Declared:
    """A tool that the client runs, where its schema stands, and its names if it belongs to a namespace."""

    function: FunctionDefinition
    kind: str
    path: str
    qualified: tool_use.QualifiedName | None


def read_tools(
    body: wire.ResponseBody, hosted: HostedTools, *, strict: bool
) -> tuple[tool_use.ToolUse | None, list[str]]:
    """The tools that may be called, and what was left out; `hosted` holds what MCP servers add.

    Raises:
        InvalidRequestError: A tool or the choice is wrong.
        UnsupportedValueError: This server does not host a tool, and `strict` is set.
    """
    if not body.tools:  # an agent without tools sends an empty list
        if body.tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice needs tools, got none", param="tool_choice")
        return None, []
    left_out = _left_out(body.tools, strict=strict)
    declared = [*_declared(body.tools, left_out, strict=strict)]
    functions, paths = [each.function for each in declared], [each.path for each in declared]
    if functions or len(body.tools) > tool_use.MAX_TOOLS:
        tool_use.check_functions(functions, "tools", paths)
    kinds = {each.function.name: each.kind for each in declared}
    by_name = {each.function.name: each.tool for each in hosted.functions}
    labels = sorted({tool.server_label or "" for tool in body.tools if tool.type == "mcp"})
    choice = _chosen(body.tool_choice, kinds, by_name, labels)
    if hosted.is_later:
        names = frozenset(kinds) | frozenset(by_name) if choice.is_one else choice.names
        choice = tool_use.Choice(names if hosted.may_call else names - by_name.keys())
    elif choice.is_required and not choice.names:
        message = "tool_choice requires a call, but no tool can be called: no MCP server listed one"
        if left_out:
            message += f", and this server does not host {', '.join(left_out)}"
        raise InvalidRequestError(message, param="tool_choice")
    use = tool_use.use_of(
        [*functions, *(each.function for each in hosted.functions)],
        [*paths, *map(path_of, hosted.functions)],
        kinds,
        choice,
        is_parallel=body.parallel_tool_calls is not False,
    )
    qualified = {each.function.name: each.qualified for each in declared if each.qualified is not None}
    left_out += hosted.left_out
    return replace(use, hosted=by_name, qualified=qualified) if use else None, left_out


def presentable(
    functions: Sequence[HostedFunction],
    can_show: Callable[[list[dict[str, object]]], bool],
    fits: Callable[[dict[str, object]], bool],
) -> tuple[Sequence[HostedFunction], list[str]]:
    """The functions of servers that a chat template can show, and the paths of what that leaves out.

    A template may ask more of a schema than grammars do: that a description is a text, for example. A function that it
    cannot show is declared with less: what a grammar can enforce, else any arguments; else it is left out alone.

    Args:
        can_show: Whether the template renders declarations of tools.
        fits: Whether a declaration leaves room for a conversation; the function is left out if it does not.
    """
    too_long = [each for each in functions if not fits(tool_use.shown_tool(each.function))]
    functions = [each for each in functions if each not in too_long] if too_long else functions
    left_out = [path_of(each) for each in too_long]
    free: dict[str, object] = {"type": "object", "properties": {}}  # some templates ask for both
    plain = FunctionDefinition(name="tool", parameters=free)
    if can_show([tool_use.shown_tool(each.function) for each in functions]) or not can_show(
        [tool_use.shown_tool(plain)]
    ):
        return functions, left_out
    kept = []
    for each in functions:
        function, at = each.function, path_of(each)
        enforced = loosened_arguments(function.parameters or {}).schema
        ways = (function, *(function.model_copy(update={"parameters": less}) for less in (enforced, free)))
        way = next((way for way in ways if can_show([tool_use.shown_tool(way)])), None)
        if way is not function:
            left_out += reported(function.name, at, [""])
        if way is not None:
            kept.append(replace(each, function=way))
    return kept, left_out


def path_of(hosted: HostedFunction) -> str:
    """Where the schema of a server's tool is."""
    return f"{hosted.tool.label}.{hosted.tool.name}.input_schema"


def _left_out(tools: Sequence[wire.ResponseTool], *, strict: bool, at: str = "") -> list[str]:
    left_out = []
    for i, tool in enumerate(tools):
        path = f"{at}tools[{i}]"
        if tool.type == "namespace" and not at:
            left_out += _left_out(tool.tools or (), strict=strict, at=f"{path}.")
        elif isinstance(tool, wire.OtherTool) or (at and tool.type not in _CALLED_BY_NAME):
            left_out.append(unhosted(tool.type, path, strict=strict))
    return left_out


def _declared(tools: Sequence[wire.ResponseTool], left_out: list[str], *, strict: bool) -> Iterator[_Declared]:
    """The tools that the client runs. The first one of a namespace is described with the namespace."""
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        _check_members(tool, at)
        if tool.type in _CALLED_BY_NAME:
            function = _function(tool, required(tool.name, f"{at}.name"), at, left_out, strict=strict)
            yield _Declared(function, tool.type, f"{at}.{_SCHEMAS[tool.type]}", None)
        if tool.type != "namespace":
            continue
        namespace, introduction = required(tool.name, f"{at}.name"), tool.description
        for j, inner in enumerate(required(tool.tools, f"{at}.tools")):
            inner_at = f"{at}.tools[{j}]"
            if inner.type in _CALLED_BY_NAME:
                _check_members(inner, inner_at)
                qualified = tool_use.QualifiedName(namespace, required(inner.name, f"{inner_at}.name"))
                described = "\n".join(text for text in (introduction, inner.description) if text) or None
                as_shown = inner.model_copy(update={"description": described})
                function = _function(as_shown, qualified.flat, inner_at, left_out, strict=strict)
                yield _Declared(function, inner.type, f"{inner_at}.{_SCHEMAS[inner.type]}", qualified)
                introduction = None


def _check_members(tool: wire.ResponseTool, at: str) -> None:
    for member, owner in (*((each, "mcp") for each in MCP_MEMBERS), ("tools", "namespace")):
        if tool.type != owner and getattr(tool, member) is not None:
            message = f"{at}.{member} is only a member of tools of type {owner}, got {shown(tool.type)}"
            raise InvalidRequestError(message, param=f"{at}.{member}")


def _function(tool: wire.ResponseTool, name: str, at: str, left_out: list[str], *, strict: bool) -> FunctionDefinition:
    """A tool as a function with this name for the model, which may be longer than a name on the wire."""
    if tool.type == "function":
        return FunctionDefinition.model_construct(
            name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
    grammar = None
    if tool.format is not None and tool.format.type == "grammar":
        required(tool.format.syntax, f"{at}.format.syntax")
        required(tool.format.definition, f"{at}.format.definition")
        grammar = GrammarDefinition.model_validate(tool.format.model_dump(include={"syntax", "definition"}))
    return tool_use.custom_function(name, tool.description, grammar, f"{at}.format.definition", left_out, strict=strict)


def _chosen(
    choice: str | wire.ResponseToolChoice | None,
    kinds: dict[str, str],
    hosted: Mapping[str, tool_use.HostedTool],
    labels: Sequence[str],
) -> tool_use.Choice:
    if choice is None or isinstance(choice, str):
        return tool_use.chosen_word(choice, {**kinds, **dict.fromkeys(hosted, "mcp")})
    if choice.type != "allowed_tools":
        is_one = choice.name is not None  # not so if all tools of a server are meant
        return tool_use.Choice(_names(choice, kinds, hosted, labels, "tool_choice"), is_required=True, is_one=is_one)
    if not choice.tools:
        at = "tool_choice.tools"
        raise InvalidRequestError(f"{at} must name at least one tool, got none", param=at)
    names = [
        _names(each, kinds, hosted, labels, f"tool_choice.tools[{i}]")
        for i, each in enumerate(choice.tools)
        if each.type in wire.KNOWN_TOOLS  # the others are left out of the tools, too
    ]
    return tool_use.Choice(frozenset().union(*names), required(choice.mode, "tool_choice.mode") == "required")


def _names(
    reference: wire.FlatReference,
    kinds: dict[str, str],
    hosted: Mapping[str, tool_use.HostedTool],
    labels: Sequence[str],
    at: str,
) -> frozenset[str]:
    """The tools that a reference means; more than one only if it names an MCP server alone."""
    if reference.type == "mcp":
        label = required(reference.server_label, f"{at}.server_label")
        tool_use.check_declared(label, labels, f"{at}.server_label")
        of_server = {name: tool.name for name, tool in hosted.items() if tool.label == label}
        if reference.name is not None and of_server:  # empty if the server did not list its tools
            tool_use.check_declared(reference.name, [*of_server.values()], f"{at}.name")
        return frozenset(name for name, known in of_server.items() if reference.name in (None, known))
    if reference.type not in _CALLED_BY_NAME:
        message = f"{at}.type must be 'function', 'custom' or 'mcp', got {shown(reference.type)}"
        raise UnsupportedValueError(message, param=f"{at}.type")
    name = required(reference.name, f"{at}.name")
    if reference.namespace:
        name = tool_use.QualifiedName(reference.namespace, name).flat
    tool_use.check_declared(name, [known for known, kind in kinds.items() if kind == reference.type], f"{at}.name")
    return frozenset({name})
