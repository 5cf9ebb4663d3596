"""Converts the messages of a chat body to the dictionaries that a chat template takes.

Content becomes one string. Parts that this server cannot show to a model are refused. Templates expect the arguments of
earlier calls as objects, so their JSON text is parsed. Whether calls can be written is up to the template. Ids of
earlier calls are those that the templates of the model's family take (`fit_call_ids`).
"""

from typing import Any

import msgspec

from weft.server.errors import InvalidRequestError, UnsupportedValueError, shown
from weft.server.formats.parser import ToolFormat
from weft.server.task.bodies import ContentPart, FunctionCall, Message, ToolCall
from weft.server.task.parts import PARTS, Spans, part_text
from weft.server.task.tool_use import CUSTOM_INPUT, fit_call_ids
from weft.server.task.validation import required
from weft.server.text.replayed import MAX_DEPTH, REASONING_PART, UNSEEN_PREFIXES, is_deep

PART_SEPARATOR = "\n"
"""Joins the parts of a content."""


def template_messages(
    messages: list[Message], tools: ToolFormat | None = None, spans: Spans | None = None
) -> list[dict[str, Any]]:
    """Every message as a dictionary for the template, without fields that were not sent.

    Args:
        tools: How the model writes calls; None: it has no tools.
        spans: Takes what is no text; None: that is refused.

    Raises:
        InvalidRequestError: There is no message, or a message does not fit its role.
        UnsupportedValueError: A part of the content cannot be shown to the model.
    """
    if not messages:
        raise InvalidRequestError("messages must hold at least one message, got none", param="messages")
    shown = [_template_message(message, f"messages[{i}]", spans) for i, message in enumerate(messages)]
    fit_call_ids(shown, tools)
    return shown


def _template_message(message: Message, at: str, spans: Spans | None) -> dict[str, Any]:
    if message.audio is not None:
        raise UnsupportedValueError(f"{at}.audio: the model does not take audio", param=f"{at}.audio")
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if message.role == "assistant" and isinstance(message.content, list):
        message, in_parts = _without_reasoning(message, message.content)
        reasoning = in_parts if reasoning is None else reasoning
    has_more = message.tool_calls or message.function_call or message.refusal or reasoning is not None
    if message.content is None and not has_more:
        message = message.model_copy(update={"content": ""})  # a turn that was cut at once, a tool that says nothing
    result: dict[str, Any] = {
        "role": "tool" if message.role == "function" else message.role,
        "content": message.refusal
        if message.content is None
        else text_of(message.content, f"{at}.content", spans=spans),
    }
    if reasoning is not None:
        result["reasoning_content"] = reasoning
        if not (message.tool_calls or message.function_call):
            result["content"] = result["content"] or ""  # the turn was cut during its reasoning
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            result[name] = getattr(message, name)
    calls = [_template_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        calls.append(function_call(message.function_call))
    if calls:
        result["tool_calls"] = calls
    return result


def _without_reasoning(message: Message, content: list[ContentPart]) -> tuple[Message, str | None]:
    """The message without the reasoning among its parts, and that; None: there was none."""
    own = [part.text for part in content if part.type == REASONING_PART]
    if not own:
        return message, None
    rest: list[ContentPart] | str = [part for part in content if part.type != REASONING_PART]
    return message.model_copy(update={"content": rest or ""}), PART_SEPARATOR.join(filter(None, own)) or None


def text_of(
    content: str | list[ContentPart], at: str, separator: str = PART_SEPARATOR, spans: Spans | None = None
) -> str:
    """Content as one string. `at` is its path in the body; `separator` joins its parts."""
    if isinstance(content, str):
        return content
    return separator.join(_part_text(part, f"{at}[{i}]", spans) for i, part in enumerate(content))


def _part_text(part: ContentPart, at: str, spans: Spans | None) -> str:
    if (text := part_text(part, at, spans)) is not None:
        return text
    if part.type in PARTS or part.type.startswith(UNSEEN_PREFIXES):
        taker = "this field" if spans is None else "the model"
        raise UnsupportedValueError(f"{at}: {taker} does not take parts of type {shown(part.type)}", param=at)
    raise InvalidRequestError(f"{at}.type must be 'text', got {shown(part.type)}", param=f"{at}.type")


def _template_call(call: ToolCall, at: str) -> dict[str, Any]:
    if call.function is not None:
        shown_call = function_call(call.function)
    else:
        custom = required(call.custom, f"{at}.{call.type or 'function'}")
        shown_call = call_of(custom.name, {CUSTOM_INPUT: custom.input})
    return shown_call if call.id is None else {"id": call.id, **shown_call}


def function_call(function: FunctionCall) -> dict[str, Any]:
    """A call of a function as templates expect it. What is no object, or one too deep, stays the model's text."""
    text = function.arguments
    try:
        arguments: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        arguments = text
    may_be_deep = text.count("{") + text.count("[") > MAX_DEPTH
    if not isinstance(arguments, dict) or (may_be_deep and is_deep(arguments)):
        arguments = {} if arguments is None or not text.strip() else text
    return call_of(function.name, arguments)


def call_of(name: str, arguments: Any) -> dict[str, Any]:
    """A call as templates expect it, without an id."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
