"""The forms in which a chat template takes messages.

Messages come in one form: content is a string, arguments of calls are objects. Some templates want lists of parts
instead, or arguments as JSON text; some tell a turn of calls alone by its content, which is null. Which of them a
template wants is tried once, with a short chat.
"""

import json
from dataclasses import dataclass
from typing import Any

import jinja2

_PROBE = "pr0be"
_NO_TOKENS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")


@dataclass(frozen=True, slots=True)
class MessageForms:
    """What a template wants.

    Attributes:
        takes_parts: It shows content as a list of parts only.
        takes_json: It shows the arguments of calls as JSON text only.
        takes_null: It shows calls only where content is null.
    """

    takes_parts: bool
    takes_json: bool
    takes_null: bool

    def applied(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message in these forms. Without content it is empty: templates read it as text of any turn."""
        if message.get("content") is None:
            message = {**message, "content": None if self.takes_null and message.get("tool_calls") else ""}
        if self.takes_parts and isinstance(message.get("content"), str):
            message = {**message, "content": _parts(message["content"])}
        if self.takes_json and isinstance(message.get("tool_calls"), list):
            message = {**message, "tool_calls": [_with_json(call) for call in message["tool_calls"]]}
        return message


def wanted_forms(template: jinja2.Template) -> MessageForms:
    """Try which forms the template shows; those in which messages come, if it shows them."""
    takes_parts = not _shows(template, [_question(_PROBE)]) and _shows(template, [_question(_parts(_PROBE))])
    tried = [
        MessageForms(takes_parts, takes_json, takes_null)
        for takes_null in (False, True)
        for takes_json in (False, True)
    ]
    call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {"x": _PROBE}}}
    chat = [_question("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    return next((forms for forms in tried if _shows(template, [forms.applied(turn) for turn in chat])), tried[0])


def _shows(template: jinja2.Template, messages: list[dict[str, Any]]) -> bool:
    seen = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        return _PROBE in template.render(_NO_TOKENS, **seen)
    except Exception:  # foreign code raises what it likes
        return False


def _question(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _with_json(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
