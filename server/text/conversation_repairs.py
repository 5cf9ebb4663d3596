"""Other ways to say the same conversation, for a chat template that refuses it or leaves a part of it out.

Templates are written for the chats that their models were trained on. Agents send other ones: a system message in the
middle, two turns of the user in a row, text beside a call. Here is what people do by hand then. Each way keeps
everything that was said, once and in order. `ways` yields them from the least change to the greatest, and
`shows_all` tells whether a prompt holds it all.

Three questions are asked one inside the other: how calls are shown, how turns alternate, where system messages stand.
Nothing here knows a template, and nothing is called for a chat that its template shows.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

Message: TypeAlias = dict[str, Any]
Repair: TypeAlias = Callable[[list[Message]], list[Message]]

SEPARATOR: Final = "\n\n"
"""Stands between texts that become one turn."""
_SYSTEM_ROLES: Final = ("system", "developer")
_REASONING_NAMES: Final = ("reasoning_content", "thinking", "reasoning")


def ways(messages: list[Message], call_texts: Sequence[str] = ()) -> Iterator[tuple[str, list[Message]]]:
    """Yield what was done, in words, and the messages then; not the messages as they are, and none of them twice."""
    seen, as_text = [messages], dict(_AS_TEXT)
    if call_texts:
        as_text = {"calls are in the text, as the model writes them": partial(_calls_written, call_texts), **_AS_TEXT}
    for calls, show_calls in {**_CALLS, **as_text}.items():
        for turns, arrange in _TURNS.items():
            for system, place in _SYSTEM.items():
                repaired = arrange(place(show_calls(messages)))
                if repaired not in seen:
                    seen.append(repaired)
                    yield ", ".join(filter(None, (system, turns, calls))), repaired


def _same(messages: list[Message]) -> list[Message]:
    return messages


def _joined(first: object, second: object) -> object:
    """Two contents as one; each is a text, a list of parts, or None."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + SEPARATOR + second
    return [*_as_parts(first), *_as_parts(second)]


def _as_parts(content: object) -> list[object]:
    return list(content) if isinstance(content, list) else [{"type": "text", "text": content}]


def _with_content(message: Message, content: object) -> Message:
    return {**message, "content": content}


# --- Where system messages stand --------------------------------------------------------------------------------------


def _later_system_in_user(messages: list[Message]) -> list[Message]:
    """The system messages at the start as one, and each later one in the user's turn beside it."""
    num_first = next((i for i, each in enumerate(messages) if each["role"] not in _SYSTEM_ROLES), len(messages))
    first: list[Message] = []
    for message in messages[:num_first]:
        first = (
            [_with_content(first[0], _joined(first[0].get("content"), message.get("content")))] if first else [message]
        )
    return first + _system_in_user(messages[num_first:])


def _system_in_user(messages: list[Message]) -> list[Message]:
    """Each system message at the start of the user's turn that follows, else at the end of the one before.

    Between turns of the model it is a turn of the user, for what was said keeps its order.
    """
    result: list[Message] = []
    waiting: object = None
    for message in [*messages, None]:
        if message is not None and message["role"] in _SYSTEM_ROLES:
            waiting = _joined(waiting, message.get("content"))
        elif message is not None and message["role"] == "user":
            result.append(_with_content(message, _joined(waiting, message.get("content"))) if waiting else message)
            waiting = None
        else:
            if waiting and result and result[-1]["role"] == "user":
                result[-1] = _with_content(result[-1], _joined(result[-1].get("content"), waiting))
            elif waiting:
                result.append({"role": "user", "content": waiting})
            waiting = None
            result += [message] if message is not None else []
    return result


# --- How turns alternate ----------------------------------------------------------------------------------------------


def _equal_roles_merged(messages: list[Message]) -> list[Message]:
    """Turns of the same role in a row as one; results stay apart, and what follows a call does."""
    result: list[Message] = []
    for message in messages:
        last = result[-1] if result else None
        if last is None or last["role"] != message["role"] or message["role"] == "tool" or last.get("tool_calls"):
            result.append(message)
            continue
        merged = {**last, **message, "content": _joined(last.get("content"), message.get("content"))}
        reasoning = {name: _joined(last.get(name), message.get(name)) for name in _REASONING_NAMES if last.get(name)}
        result[-1] = {**merged, **reasoning}
    return result


def _alternating(messages: list[Message]) -> list[Message]:
    """User and assistant in turn: a blank turn stands where one is missing. Some templates refuse an empty one."""
    result: list[Message] = []
    for message in _equal_roles_merged(messages):
        before = result[-1]["role"] if result else "system"
        if message["role"] == "user" and before == "tool":
            result.append({"role": "assistant", "content": " "})
        elif message["role"] == "assistant" and before in _SYSTEM_ROLES:
            result.append({"role": "user", "content": " "})
        result.append(message)
    return result


def _empty_left_out(messages: list[Message]) -> list[Message]:
    """Without turns that say nothing, such as an answer that was cut before its first word."""
    return _equal_roles_merged([each for each in messages if each.get("content") or each.get("tool_calls")])


# --- How calls are shown ----------------------------------------------------------------------------------------------


def _content_apart(messages: list[Message]) -> list[Message]:
    """Text beside calls as a turn of its own before them."""
    result: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and message.get("content"):
            # Templates show the reasoning before a call rather than that of a turn without one.
            apart = ("tool_calls", *_REASONING_NAMES)
            result.append({name: value for name, value in message.items() if name not in apart})
            kept = {name: message[name] for name in apart if name in message}
            result.append({"role": message["role"], "content": "", **kept})
        else:
            result.append(message)
    return result


def _one_call_a_turn(messages: list[Message]) -> list[Message]:
    """Parallel calls as one after the other, each with its result behind it."""
    result: list[Message] = []
    i = 0
    while i < len(messages):
        message, i = messages[i], i + 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            result.append(message)
            continue
        end = next((j for j in range(i, len(messages)) if messages[j]["role"] != "tool"), len(messages))
        answers, i = messages[i:end], end
        for num_before, call in enumerate(calls):
            turn = {"role": message["role"], "content": ""} if num_before else message
            own = [each for each in answers if each.get("tool_call_id") == call.get("id")]
            answers = [each for each in answers if each not in own]
            result += [{**turn, "tool_calls": [call]}, *own]
        result += answers
    return result


def _one_call_apart(messages: list[Message]) -> list[Message]:
    return _content_apart(_one_call_a_turn(messages))


def _calls_as_text(messages: list[Message]) -> list[Message]:
    """Calls as JSON in the text of their turn, results as turns of the user: what a model without tools can read."""
    result = _calls_written(_AS_JSON, messages)
    return [{"role": "user", "content": each.get("content")} if each["role"] == "tool" else each for each in result]


def _calls_written(texts: Sequence[str], messages: list[Message]) -> list[Message]:
    """Calls in the text of their turn, with these texts around them (see `TextTokenizer`)."""
    opening, before, middle, after, between, closing = texts
    result: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            functions = [(call["function"]["name"], call["function"].get("arguments")) for call in calls]
            parts = [f"{before}{name}{middle}{_arguments(given, middle)}{after}" for name, given in functions]
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            written = opening + between.join(parts) + closing
            message = _with_content(message, _joined(message.get("content"), written))
        result.append(message)
    return result


def _arguments(given: Any, middle: str) -> str:
    """Arguments as JSON, or, in a bracket, as keywords of Python."""
    if middle != "(" or not isinstance(given, dict):
        return given if middle == "(" and isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    values = [(name, json.dumps(value, ensure_ascii=False)) for name, value in given.items()]
    return ", ".join(f"{name}={_IN_PYTHON.get(value, value)}" for name, value in values)


_AS_JSON: Final = "", '{"name": "', '", "arguments": ', "}", "\n", ""
_IN_PYTHON: Final = {"true": "True", "false": "False", "null": "None"}
_SYSTEM: Final[dict[str, Repair]] = {
    "": _same,
    "later system messages are in turns of the user": _later_system_in_user,
    "system messages are in turns of the user": _system_in_user,
}
_TURNS: Final[dict[str, Repair]] = {
    "": _same,
    "turns of one role are merged": _equal_roles_merged,
    "empty turns are left out": _empty_left_out,
    "blank turns stand between those that do not alternate": _alternating,
}
_CALLS: Final[dict[str, Repair]] = {
    "": _same,
    "text beside calls is a turn before them": _content_apart,
    "parallel calls are turns of their own": _one_call_a_turn,
    "parallel calls and the text beside them are turns of their own": _one_call_apart,
}
_AS_TEXT: Final[dict[str, Repair]] = {"calls are JSON text, and results are turns of the user": _calls_as_text}


def tools_told(messages: Sequence[Message], tools: Sequence[object]) -> list[Message]:
    """The tools as JSON in the system message, for a template that does not show them."""
    functions = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    text = "\n".join(["You may call these functions:", *(json.dumps(each, ensure_ascii=False) for each in functions)])
    if messages and messages[0]["role"] in _SYSTEM_ROLES:
        return [_with_content(messages[0], _joined(messages[0].get("content"), text)), *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


# --- What a prompt shows ----------------------------------------------------------------------------------------------


def shows_all(prompt: str, messages: Sequence[Message]) -> bool:
    """Whether the prompt holds the content and the calls of every message, in their order.

    Templates move system messages and results, so these may stand anywhere. Reasoning is the template's to leave out.
    """
    position = 0
    for message in messages:
        may_move = message["role"] in (*_SYSTEM_ROLES, "tool")
        after = position
        for text in _said(message):
            found = _end_of(text, prompt, position)
            if found < 0 and may_move:
                found = min(_end_of(text, prompt, 0), position)
            if found < 0:
                return False
            after = max(after, found)
        position = after
    return True


def _said(message: Message) -> Iterator[str]:
    content = message.get("content")
    parts = [content] if isinstance(content, str) else [part.get("text") for part in content or ()]
    for text in parts:
        if isinstance(text, str):
            yield text.rpartition("</think>")[2].strip()
    for call in message.get("tool_calls") or ():
        yield call["function"]["name"]
        yield from _texts(call["function"].get("arguments"))


def _texts(value: object) -> Iterator[str]:
    """Every text in JSON data but the keys."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _end_of(text: str, prompt: str, start: int) -> int:
    """Where the text ends in the prompt, as it is or inside JSON; -1: nowhere."""
    for written in (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]):
        if (position := prompt.find(written, start)) >= 0:
            return position + len(written)
    return -1
