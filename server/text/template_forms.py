"""The forms in which a chat template takes messages.

Messages come in one form: content is a string, arguments of calls are objects. Some templates want lists of parts
instead, or arguments as JSON text. Which of them a template wants is tried once, with a short chat.
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
    """

    takes_parts: bool
    takes_json: bool

    def applied(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message in these forms."""
        if self.takes_parts and isinstance(message.get("content"), str):
            message = {**message, "content": _parts(message["content"])}
        if self.takes_json and isinstance(message.get("tool_calls"), list):
            message = {**message, "tool_calls": [_with_json(call) for call in message["tool_calls"]]}
        return message


def wanted_forms(template: jinja2.Template) -> MessageForms:
    """Try which forms the template shows; those in which messages come, if it shows them."""
    takes_parts = not _shows(template, _chat(_PROBE)) and _shows(template, _chat(_parts(_PROBE)))
    content = _parts("x") if takes_parts else "x"
    arguments = {"x": _PROBE}
    takes_json = not _shows(template, _chat(content, arguments)) and _shows(
        template, _chat(content, json.dumps(arguments))
    )
    return MessageForms(takes_parts, takes_json)


def _shows(template: jinja2.Template, messages: list[dict[str, Any]]) -> bool:
    seen = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        return _PROBE in template.render(_NO_TOKENS, **seen)
    except Exception:  # foreign code raises what it likes
        return False


def _chat(content: object, arguments: object = None) -> list[dict[str, Any]]:
    """A question; with arguments, a call as its answer."""
    user = {"role": "user", "content": content}
    call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [user] if arguments is None else [user, {"role": "assistant", "content": content, "tool_calls": [call]}]


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _with_json(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
