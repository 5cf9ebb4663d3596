"""Finds the forms in which a chat template takes messages, by rendering a short chat in each, and names of tools.

Messages come in one form: content is a string, arguments of calls are objects. Some templates want lists of parts
instead, or arguments as JSON text; some tell a turn of calls alone by its content, which is null; some fail where there
are no tools, and some never show tools. Each is tried once, when the first chat is rendered. What a model wrote as
arguments may be no object: cut JSON, a list, other text. It is shown as it was written, or as the only member of an
object where the template goes through the members.
"""

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

import jinja2

_PROBE = "pr0be"
NO_TOKENS: Final = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")

_NO_TOOLS: Final[tuple[Mapping[str, object], ...]] = (
    {"tools": None},
    {"tools": []},
    {"tools": None, "functions": "[]", "datetime": ""},
)
"""What templates may see where there are no tools, the usual form first."""

TEXT_MEMBER: Final = "arguments"
"""The member that holds arguments which are no object, where the template takes objects only."""


@dataclass(frozen=True, slots=True)
class MessageForms:
    """The forms in which a template takes messages.

    Attributes:
        takes_parts: It shows content as a list of parts only.
        takes_json: It shows the arguments of calls as JSON text only.
        takes_null: It shows calls only where content is null.
        takes_text: It shows arguments that are a text, whatever the text is.
        no_tools: What it sees where there are no tools.
        shows_tools: It shows tools, or refuses all chats with them.
    """

    takes_parts: bool = False
    takes_json: bool = False
    takes_null: bool = False
    takes_text: bool = False
    no_tools: Mapping[str, object] = field(default_factory=lambda: _NO_TOOLS[0])
    shows_tools: bool = True

    def applied(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message in these forms. Without content it is empty: templates read it as text of any turn."""
        if message.get("content") is None:
            message = {**message, "content": None if self.takes_null and message.get("tool_calls") else ""}
        if self.takes_parts and isinstance(message.get("content"), str):
            message = {**message, "content": _parts(message["content"])}
        if isinstance(message.get("tool_calls"), list):
            message = {**message, "tool_calls": [self._call(call) for call in message["tool_calls"]]}
        return message

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function.get("arguments")
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        elif not isinstance(arguments, dict):
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            arguments = text if self.takes_text or self.takes_json else {TEXT_MEMBER: text}
        if self.takes_json and isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}


def wanted_forms(template: jinja2.Template, wanted: Set[str] = frozenset()) -> MessageForms:
    """Try which forms the template shows; those in which messages come, if it shows them.

    Args:
        wanted: Names that the template uses and does not define.
    """
    no_tools = next((each for each in _NO_TOOLS if _shows(template, [_question(_PROBE)], each)), None)
    blank = no_tools or _NO_TOOLS[0]
    takes_parts = no_tools is None and _shows(template, [_question(_parts(_PROBE))], blank)

    def shows_call(forms: MessageForms, arguments: object) -> bool:
        call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        chat = [_question("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
        return _shows(template, [forms.applied(turn) for turn in chat], blank)

    tried = [
        MessageForms(takes_parts, takes_json, takes_null, takes_text=True, no_tools=blank)
        for takes_null in (False, True)
        for takes_json in (False, True)
    ]
    forms = next((each for each in tried if shows_call(each, {"x": _PROBE})), tried[0])
    forms = forms if shows_call(forms, _PROBE) else replace(forms, takes_text=False)
    return replace(forms, shows_tools=_shows_tools(template, forms, wanted))


def _shows_tools(template: jinja2.Template, forms: MessageForms, wanted: Set[str]) -> bool:
    """Whether it shows a tool to a chat with or without a system message; also true if it refuses both."""
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": _PROBE, "description": "x", "parameters": parameters}}
    seen = with_tools({"tools": [tool]}, wanted)
    chats = [_question("x")], [{"role": "system", "content": "x"}, _question("x")]
    written = [_written(template, [forms.applied(turn) for turn in chat], seen) for chat in chats]
    return all(text is None for text in written) or any(_PROBE in (text or "") for text in written)


def _shows(template: jinja2.Template, messages: list[dict[str, Any]], tools: Mapping[str, object]) -> bool:
    return _PROBE in (_written(template, messages, tools) or "")


def _written(template: jinja2.Template, messages: list[dict[str, Any]], tools: Mapping[str, object]) -> str | None:
    """What it makes of messages; None if it refuses them."""
    seen = {"messages": messages, "documents": None, "add_generation_prompt": True, **tools}
    try:
        return template.render(NO_TOKENS, **seen)
    except MemoryError:
        raise
    except Exception:  # foreign code raises what it likes
        return None


def _question(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


TEXT_NAMES, LIST_NAMES = ("functions",), ("xml_tools",)
"""Where other templates take the tools than in `tools`: as JSON text (Firefunction), or as a list (SmolLM 3)."""


def with_tools(variables: Mapping[str, object], wanted: Set[str]) -> dict[str, object]:
    """Return the variables, with the tools under the name that the template wants.

    Args:
        variables: Tools are a list under `tools`, if there are any.
        wanted: Names that the template uses and does not define.
    """
    tools = variables.get("tools")
    if not isinstance(tools, list) or not tools or "tools" in wanted:
        return dict(variables)
    added: dict[str, object] = {name: tools for name in LIST_NAMES if name in wanted}
    functions = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    added |= {name: json.dumps(functions, ensure_ascii=False, indent=4) for name in TEXT_NAMES if name in wanted}
    if added and "datetime" in wanted:
        added["datetime"] = datetime.now().strftime("%Y-%m-%d")
    return {**added, **variables}


def completed(seen: Mapping[str, object]) -> dict[str, object]:
    """The variables with what templates join to other text though it may be missing: tokens, descriptions of tools."""
    tools = seen.get("tools")
    return {**NO_TOKENS, **seen, "tools": _described(tools) if isinstance(tools, list) else tools}


def _described(value: Any) -> Any:
    """Tools in which every function and every property has a description, be it empty."""
    if isinstance(value, list):
        return [_described(item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {name: _described(item) for name, item in value.items()}
    if isinstance(value.get("function"), dict):
        result["function"] = {"description": "", **result["function"]}
    if isinstance(properties := value.get("properties"), dict):
        result["properties"] = {
            name: {"description": "", **each} if isinstance(properties[name], dict) else each
            for name, each in result["properties"].items()
        }
    return result
