"""Reads the input of POST /v1/decisions as the messages of a chat.

Messages stay messages, and calls become those of the assistant. JSON is shown as compact text.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from weft.server.errors import InvalidRequestError, UnsupportedValueError, shown
from weft.server.request.validation import check_range, required
from weft.server.schemas.chat_completions import ContentPart, CustomCall, FunctionCall, Message, ToolCall
from weft.server.schemas.decisions import DecisionContent, DecisionItem

MAX_JSON_LEVELS = 32
MAX_JSON_VALUES = 10_000
MAX_JSON_BYTES = 256 << 10
_USER_PARTS = frozenset({"input_text", "input_json"})
_PARTS = {"user": _USER_PARTS, "assistant": frozenset({"output_text", "refusal"})}


def chat_of(given: str | Sequence[DecisionItem], param: str = "input") -> list[Message]:
    """The input as messages; `param` is its field.

    Raises:
        InvalidRequestError: An item lacks a member, is blank, or names a call that is not there.
        UnsupportedValueError: A part is an image.
    """
    if isinstance(given, str):
        return [Message(role="user", content=not_blank(given, param))]
    messages: list[Message] = []
    calls: set[tuple[str, str]] = set()
    for i, item in enumerate(given):
        at = f"input[{i}]"
        if item.type == "message":
            messages.append(_message(item, at))
            continue
        call_id = required(item.call_id, f"{at}.call_id")
        kind = item.type.removesuffix("_output")
        if item.type == kind:
            calls.add((kind, call_id))
            call = _call(item, call_id, at)
            if messages and messages[-1].role == "assistant":  # calls belong to the turn that they end
                calls_so_far = messages[-1].tool_calls or []
                messages[-1] = messages[-1].model_copy(update={"tool_calls": [*calls_so_far, call]})
            else:
                messages.append(Message(role="assistant", tool_calls=[call]))
        elif (kind, call_id) in calls:
            if item.output is None:
                raise InvalidRequestError(f"{at}.output is required", param=f"{at}.output")
            output = _content(item.output, f"{at}.output")
            messages.append(Message(role="tool", tool_call_id=call_id, content=output))
        else:
            message = f"{at}.call_id must be that of an earlier {kind}, got {shown(call_id)}"
            raise InvalidRequestError(message, param=f"{at}.call_id")
    return messages


def instructions_of(content: DecisionContent, at: str) -> str:
    """The text of a question; `at` is its path in the body. Raises as `chat_of`."""
    read = _content(content, at, _USER_PARTS)
    text = read if isinstance(read, str) else "\n".join(part.text or "" for part in read)
    return not_blank(text, at)


def not_blank(text: str, at: str) -> str:
    """Return the text.

    Raises:
        InvalidRequestError: It holds white space only.
    """
    if not text.strip():
        raise InvalidRequestError(f"{at} must not be blank", param=at)
    return text


def compact_json(data: object, at: str) -> str:
    """JSON data as its text.

    Raises:
        InvalidRequestError: It is too deep, too much or too long.
    """
    num_values = num_levels = 0
    for level in _levels(data):
        num_values += len(level)
        num_levels += any(map(_is_container, level))
        check_range(f"the container levels of {at}", num_levels, 0, MAX_JSON_LEVELS, param=at)
        check_range(f"the number of values in {at}", num_values, 0, MAX_JSON_VALUES, param=at)
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    check_range(f"the bytes of {at} as compact JSON", len(text.encode()), 0, MAX_JSON_BYTES, param=at)
    return text


def _levels(data: object) -> Iterator[list[Any]]:
    """The values of JSON data by their depth."""
    level: list[Any] = [data]
    while level:
        yield level
        lists = [value.values() if isinstance(value, dict) else value for value in level if _is_container(value)]
        level = [item for items in lists for item in items]


def _is_container(value: object) -> bool:
    return isinstance(value, list | dict)


def _message(item: DecisionItem, at: str) -> Message:
    if item.role is None or item.content is None:
        param = f"{at}.role" if item.role is None else f"{at}.content"
        raise InvalidRequestError(f"{param} is required", param=param)
    return Message(role=item.role, content=_content(item.content, f"{at}.content", _PARTS.get(item.role)))


def _call(item: DecisionItem, call_id: str, at: str) -> ToolCall:
    name = required(item.name, f"{at}.name")
    if item.type == "function_call":
        call = FunctionCall(name=name, arguments=required(item.arguments, f"{at}.arguments"))
        return ToolCall(id=call_id, function=call)
    return ToolCall(id=call_id, type="custom", custom=CustomCall(name=name, input=required(item.input, f"{at}.input")))


def _content(content: DecisionContent, at: str, types: frozenset[str] | None = None) -> str | list[ContentPart]:
    """A content for a chat. `types` are the parts that it may have; None: texts alone."""
    if isinstance(content, str):
        return content
    parts = []
    for i, part in enumerate(content):
        path, kinds = f"{at}[{i}]", types or frozenset({"input_text"})
        if part.type == "input_image":
            raise UnsupportedValueError(f"{path}: the model does not take parts of type 'input_image'", param=path)
        if part.type not in kinds:
            wanted = ", ".join(sorted(kinds))
            raise InvalidRequestError(
                f"{path}.type must be one of {wanted}, got {shown(part.type)}", param=f"{path}.type"
            )
        if part.type == "input_json":
            text = _json_text(part.data, f"{path}.data")
        else:
            name = "refusal" if part.type == "refusal" else "text"
            text = required(getattr(part, name), f"{path}.{name}")
        parts.append(ContentPart(type="text", text=text, prompt_cache_breakpoint=part.prompt_cache_breakpoint))
    return parts


def _json_text(data: object, at: str) -> str:
    items = data if isinstance(data, list) else [data]
    if not all(isinstance(item, dict) for item in items):
        raise InvalidRequestError(f"{at} must be an object or a list of objects, got {shown(data)}", param=at)
    return compact_json(data, at)
