"""Finds the forms in which a chat template takes messages, by rendering a short chat in each, and names of tools.

Messages come in one form: content is a string, arguments of calls are objects. Some templates want lists of parts
instead, or arguments as JSON text; some tell a turn of calls alone by its content, which is null; some fail where the
tools are null. Each is tried once, when the first chat is rendered. What a model wrote as arguments may be no object:
cut JSON, a list, other text. It is shown as it was written, or as the only member of an object where the template goes
through the members.
"""

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import jinja2

from weft.server.text.template_sandbox import PROBE_SECONDS, TemplateLimitError, limits

_PROBE = "pr0be"
_NO_TOKENS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")

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
        takes_list: It shows a chat only where the tools are a list, be it empty.
    """

    takes_parts: bool = False
    takes_json: bool = False
    takes_null: bool = False
    takes_text: bool = False
    takes_list: bool = False

    @property
    def no_tools(self) -> list[object] | None:
        """What stands for the tools where there are none."""
        return [] if self.takes_list else None

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


def wanted_forms(template: jinja2.Template) -> MessageForms:
    """Try which forms the template shows; those in which messages come, if it shows them.

    Raises:
        TemplateLimitError: It takes too much.
    """
    takes_list = not _shows(template, [_question(_PROBE)], None) and _shows(template, [_question(_PROBE)], [])
    tools: list[object] | None = [] if takes_list else None
    takes_parts = not _shows(template, [_question(_PROBE)], tools) and _shows(
        template, [_question(_parts(_PROBE))], tools
    )

    def shows_call(forms: MessageForms, arguments: object) -> bool:
        call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        chat = [_question("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
        return _shows(template, [forms.applied(turn) for turn in chat], tools)

    tried = [
        MessageForms(takes_parts, takes_json, takes_null, takes_text=True, takes_list=takes_list)
        for takes_null in (False, True)
        for takes_json in (False, True)
    ]
    forms = next((each for each in tried if shows_call(each, {"x": _PROBE})), tried[0])
    return forms if shows_call(forms, _PROBE) else replace(forms, takes_text=False)


def _shows(template: jinja2.Template, messages: list[dict[str, Any]], tools: list[object] | None) -> bool:
    seen = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
    try:
        with limits(PROBE_SECONDS):
            return _PROBE in template.render(_NO_TOKENS, **seen)
    except TemplateLimitError:
        raise
    except Exception:  # foreign code raises what it likes
        return False


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
