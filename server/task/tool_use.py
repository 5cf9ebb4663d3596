"""Reads the tools of a chat body: what the template shows, which the model may call, and the ids of earlier calls.

The input of a custom tool is text. The model sees it as a function with one string argument, `input`. The deprecated
`functions` and `function_call` mean the same under other names, with at most one call.
"""

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.server.errors import InvalidRequestError, UnsupportedValueError, shown
from weft.server.formats.lark_regex import NotRegularError, lark_regex
from weft.server.formats.parser import Tool, ToolFormat
from weft.server.json_schema.patterns import portable
from weft.server.task import schema as wire
from weft.server.task.bodies import ChatCompletionBody
from weft.server.task.schema import FunctionDefinition, GrammarDefinition
from weft.server.task.structured_output import enforceable, exact
from weft.server.task.validation import required
from weft.server.text.declared import unhosted

MAX_TOOLS = 1024
CUSTOM_INPUT = "input"
"""Name of the one argument of a custom tool."""
_SCHEMAS = {"function": "function.parameters", "custom": "custom.format"}
"""Where the declaration says what a call may hold."""


@dataclass(frozen=True, slots=True)
class HostedTool:
    """A tool that this server calls itself: who has it, and its name there."""

    label: str
    name: str
    needs_approval: bool


@dataclass(frozen=True, slots=True)
class QualifiedName:
    """A tool of a namespace. Templates and models know one name for each tool, so they are shown `flat`."""

    namespace: str
    name: str

    @property
    def flat(self) -> str:
        """Both names in one, joined by two underscores, as agents do where there are no namespaces."""
        return f"{self.namespace.rstrip('_')}__{self.name.lstrip('_')}"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how they may be called.

    Attributes:
        shown: The declarations for the template, as objects of type function.
        tools: The tools that may be called.
        is_required: The answer must hold at least one call.
        allows_many: The answer may hold more than one call.
        custom_names: Names of the tools whose input is text.
        is_legacy: The tools were declared as `functions`, so the answer has `function_call`.
        hosted: The tools that this server calls itself, by the name that the model knows.
        lost: Paths of what the schemas ask for and the grammar does not enforce.
        qualified: The tools of namespaces, by the name that the model knows.
    """

    shown: list[dict[str, Any]]
    tools: list[Tool]
    is_required: bool
    allows_many: bool
    custom_names: frozenset[str] = frozenset()
    is_legacy: bool = False
    hosted: Mapping[str, HostedTool] = field(default_factory=dict)
    lost: Sequence[str] = ()
    qualified: Mapping[str, QualifiedName] = field(default_factory=dict)

    @property
    def param(self) -> str:
        """The field that declares the tools."""
        return "functions" if self.is_legacy else "tools"


def tool_use(body: ChatCompletionBody, *, strict: bool) -> tuple[ToolUse | None, list[str]]:
    """Read the tools of a body; None if no tool may be called. Also what is left out of the prompt or not enforced.

    Raises:
        InvalidRequestError: A tool is declared twice or incompletely, or the body names an undeclared tool.
        UnsupportedValueError: Something would be left out, and `strict` is set.
    """
    if body.functions:
        return _legacy_use(body, body.functions), []
    if body.function_call not in (None, "none", "auto"):
        raise InvalidRequestError("function_call needs functions", param="function_call")
    if not body.tools:  # clients send a list without tools where they have none
        if body.tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice needs tools, got none", param="tool_choice")
        return None, []
    left_out: list[str] = []
    functions, paths, kinds = list[FunctionDefinition](), list[str](), dict[str, str]()
    for i, tool in enumerate(body.tools):
        if isinstance(tool, wire.OtherTool):
            left_out.append(unhosted(tool.type, f"tools[{i}]", strict=strict))
            continue
        functions.append(_function(tool, f"tools[{i}]", left_out, strict=strict))
        paths.append(f"tools[{i}].{_SCHEMAS[tool.type]}")
        kinds[functions[-1].name] = tool.type
    check_functions(functions, "tools", paths)
    choice = _chosen(body.tool_choice, kinds)
    if choice.is_required and not choice.names:
        message = f"tool_choice requires a call, but this server hosts none of {', '.join(left_out)}"
        raise InvalidRequestError(message, param="tool_choice")
    return use_of(functions, paths, kinds, choice, is_parallel=body.parallel_tool_calls is not False), left_out


@dataclass(frozen=True, slots=True)
class Choice:
    """The tools that may be called, whether a call is required, and whether a single tool was named."""

    names: frozenset[str]
    is_required: bool = False
    is_one: bool = False


def use_of(
    functions: Sequence[FunctionDefinition],
    paths: Sequence[str],
    kinds: Mapping[str, str],
    choice: Choice,
    *,
    is_parallel: bool,
) -> ToolUse | None:
    """Put checked declarations and the choice together; None if no tool may be called.

    Args:
        paths: Where the schema of each function is.
        kinds: Maps names to kinds.
    """
    if not choice.names:
        return None
    named = [(each, path) for each, path in zip(functions, paths, strict=True) if each.name in choice.names]
    tools, lost = enforceable([_tool(function, path) for function, path in named])
    return ToolUse(
        shown=[shown_tool(function) for function in functions],
        tools=tools,
        is_required=choice.is_required,
        allows_many=is_parallel and not choice.is_one,
        custom_names=frozenset(name for name, kind in kinds.items() if kind == "custom"),
        lost=lost,
    )


def _legacy_use(body: ChatCompletionBody, functions: list[FunctionDefinition]) -> ToolUse | None:
    if body.tools:
        raise InvalidRequestError("functions is the old name of tools: send only one of them", param="functions")
    paths = [f"functions[{i}].parameters" for i in range(len(functions))]
    check_functions(functions, "functions", paths)
    if body.function_call == "none":
        return None
    names = frozenset(function.name for function in functions)
    choice = Choice(names)
    if isinstance(body.function_call, wire.NamedTool):
        check_declared(body.function_call.name, [function.name for function in functions], "function_call.name")
        choice = Choice(frozenset({body.function_call.name}), is_required=True, is_one=True)
    use = use_of(functions, paths, {}, choice, is_parallel=False)
    return replace(use, is_legacy=True) if use else None


def _function(tool: wire.ToolDefinition, at: str, left_out: list[str], *, strict: bool) -> FunctionDefinition:
    """The declaration of any tool, as a function."""
    if tool.type == "function":
        return required(tool.function, f"{at}.function")
    custom, grammar = required(tool.custom, f"{at}.custom"), None
    if custom.format is not None and custom.format.type == "grammar":
        grammar = required(custom.format.grammar, f"{at}.custom.format.grammar")
    path = f"{at}.custom.format.grammar.definition"
    return custom_function(custom.name, custom.description, grammar, path, left_out, strict=strict)


def custom_function(
    name: str, description: str | None, grammar: GrammarDefinition | None, at: str, left_out: list[str], *, strict: bool
) -> FunctionDefinition:
    """A custom tool as a function.

    Args:
        grammar: None if the input is free text.
        at: Path of the grammar's text. It is added to `left_out` if the grammar cannot be followed; the model is told
            what the input must be all the same.

    Raises:
        UnsupportedValueError: The grammar cannot be followed, and `strict` is set.
    """
    text: dict[str, Any] = {"type": "string"}
    if grammar is not None:
        pattern, fault = _pattern_of(grammar)
        if pattern is not None:
            text["pattern"] = pattern
        elif strict:
            raise UnsupportedValueError(f"{at}: {fault}", param=at)
        else:
            left_out.append(at)
        if grammar.syntax == "lark" or pattern is None:
            description = _with_grammar(description, grammar)
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return FunctionDefinition.model_construct(name=name, description=description, parameters=parameters)


def _with_grammar(description: str | None, grammar: GrammarDefinition) -> str:
    """A description that shows the model the grammar of the tool's input."""
    kind = {"lark": "Lark grammar", "regex": "regular expression"}.get(grammar.syntax, f"{grammar.syntax} grammar")
    return f"{description or ''}\nThe input follows this {kind}:\n{grammar.definition}".strip()


def _pattern_of(grammar: GrammarDefinition) -> tuple[str | None, str]:
    """The pattern that the whole input matches; None if there is none, and why."""
    if grammar.syntax not in ("lark", "regex"):
        return None, f"the syntax must be 'lark' or 'regex', got {shown(grammar.syntax)}"
    try:
        expression = grammar.definition if grammar.syntax == "regex" else lark_regex(grammar.definition)
    except NotRegularError as error:
        return None, (
            "the input of a tool is written inside JSON, where only a regular grammar can be followed, one whose rules "
            f"do not use themselves: {error}"
        )
    return portable(f"^(?:{expression})$"), "look-around, references back and broken expressions cannot be followed"


def check_functions(functions: Sequence[FunctionDefinition], param: str, paths: Sequence[str]) -> None:
    """Check the number, the names and, of strict ones, the schemas. `paths`: where the schema of each function is."""
    if len(functions) > MAX_TOOLS:
        raise InvalidRequestError(f"{param} must hold at most {MAX_TOOLS} tools, got {len(functions)}", param=param)
    seen: set[str] = set()
    for path, function in zip(paths, functions, strict=True):
        if function.name in seen:
            at = path.partition(".")[0]
            raise InvalidRequestError(f"{at} declares {shown(function.name)} a second time", param=at)
        seen.add(function.name)
        if function.strict:
            exact(function.parameters or {}, path, function.name, is_object=True)


def check_declared(name: str, names: Sequence[str], param: str) -> None:
    """Check that a choice names a declared tool."""
    if name not in names:
        raise InvalidRequestError(f"{param} must be one of {shown(names)}, got {shown(name)}", param=param)


def chosen_word(choice: str | None, kinds: Mapping[str, str]) -> Choice:
    """What none, auto and required mean."""
    return Choice(frozenset(() if choice == "none" else kinds), choice == "required")


def _chosen(choice: str | wire.ToolChoiceObject | None, kinds: Mapping[str, str]) -> Choice:
    if choice is None or isinstance(choice, str):
        return chosen_word(choice, kinds)
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None or not choice.allowed_tools.tools:
            at = "tool_choice.allowed_tools.tools"
            raise InvalidRequestError(f"{at} must name at least one tool, got none", param=at)
        references = enumerate(choice.allowed_tools.tools)
        names = [_name(each, kinds, f"tool_choice.allowed_tools.tools[{i}]") for i, each in references]
        return Choice(frozenset(names), choice.allowed_tools.mode == "required")
    return Choice(frozenset({_name(choice, kinds, "tool_choice")}), is_required=True, is_one=True)


def _name(reference: wire.ToolReference | wire.ToolChoiceObject, kinds: Mapping[str, str], at: str) -> str:
    """Check a reference to a declared tool, and return the tool's name."""
    at += f".{reference.type}"
    name = required(reference.function if reference.type == "function" else reference.custom, at).name
    check_declared(name, [known for known, kind in kinds.items() if kind == reference.type], f"{at}.name")
    return name


def shown_tool(function: FunctionDefinition) -> dict[str, Any]:
    """A declaration as templates expect it: the fields that were sent, without those meant for this server only."""
    declared = function.model_dump(exclude_none=True, exclude={"strict"})
    schema = declared.get("parameters", {})
    if not isinstance(required := schema.get("required", []), list):  # templates go through both without asking
        declared["parameters"] = schema = {**schema, "required": [required] if isinstance(required, str) else []}
    if not isinstance(schema.get("properties", {}), dict):
        declared["parameters"] = {**schema, "properties": {}}
    return {"type": "function", "function": declared}


def _tool(function: FunctionDefinition, at: str) -> Tool:
    return Tool(function.name, function.parameters or {"type": "object", "properties": {}}, bool(function.strict), at)


def fit_call_ids(messages: list[dict[str, Any]], tools: ToolFormat | None) -> None:
    """Give results that have no id that of their call; number calls anew in the family's way, unless all ids fit it."""
    _answer_calls(messages)
    if tools is None or not tools.call_id:
        return
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    if all(re.fullmatch(tools.call_id_pattern, call.get("id", "")) for call in calls):
        return
    index, fitting = 0, dict[str, str]()
    for message in messages:
        for call in message.get("tool_calls", ()):
            made = tools.call_id.format(index=index, name=call["function"]["name"])
            fitting[call.get("id", "")] = call["id"] = made
            index += 1
        if "tool_call_id" in message:
            message["tool_call_id"] = fitting.get(message["tool_call_id"], message["tool_call_id"])


def _answer_calls(messages: list[dict[str, Any]]) -> None:
    """Number calls without an id, and give each result without one that of the first call that has no result yet.

    Of a result with a name it is the first one of that name, if there is one.
    """
    waiting: OrderedDict[str, None] = OrderedDict()  # ids; a dict is slow to find its first key
    named: defaultdict[str | None, deque[str]] = defaultdict(deque)  # ids by names; some have a result
    given = {call.get("id") for message in messages for call in message.get("tool_calls", ())}
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            if "id" not in call:
                while f"call_{number}" in given:
                    number += 1
                call["id"] = f"call_{number}"
            number += 1
            waiting[call["id"]] = None
            named[call["function"]["name"]].append(call["id"])
        if "tool_call_id" in message:
            waiting.pop(message["tool_call_id"], None)
        elif message["role"] == "tool" and waiting:
            ids = named[message.get("name")]
            while ids and ids[0] not in waiting:
                ids.popleft()
            message["tool_call_id"] = first = ids[0] if ids else next(iter(waiting))
            del waiting[first]
