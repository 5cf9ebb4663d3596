"""Reads what clients say again in forms of their own: arguments, ids, results of tools, parts, and reasoning.

Conversations come through frameworks and proxies, and a refused turn ends them, so each form that has one meaning is
read. What is read has the forms of OpenAI's API. Anything else stays as it is: the schemas say what is wrong with it.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

REASONING_PARTS = frozenset({"thinking", "reasoning", "reasoning_text"})
"""Types of the parts that hold reasoning; those of `SEALED_PARTS` hold another server's, which cannot be read."""
SEALED_PARTS = frozenset({"redacted_thinking", "redacted-reasoning", "redacted_reasoning"})
REASONING_PART = "reasoning_text"
"""The type of such parts once they are read."""
_REASONING_MEMBERS = ("thinking", "text", "reasoning_text", "reasoning_content", "reasoning", "content", "summary")
"""Where the text of reasoning may be; the first that holds one counts."""

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""Types of the parts whose `text` is what they say."""
_RESULT_PARTS = TEXT_PARTS | {"refusal"}
_ANSWER_PARTS = _RESULT_PARTS | REASONING_PARTS | SEALED_PARTS
UNSEEN_PREFIXES = ("image", "input_", "audio", "video", "file", "document", "computer_screenshot", "container_upload")
"""Beginnings of the types of parts that no text stands for."""

MAX_DEPTH = 64
"""Levels of objects and lists in what a template is shown: some call themselves for each."""


def json_of(value: object) -> str:
    """A text as it is, and the JSON of anything else; nothing for null."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def is_deep(value: object, depth: int = MAX_DEPTH) -> bool:
    """Whether a value of JSON has more levels than these."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(is_deep(each, depth - 1) for each in inner)


def reasoning_text(value: object, depth: int = 8) -> str | None:
    """The reasoning in a text, a part, or a list of these; None if there is none."""
    if isinstance(value, str):
        return value
    if depth and isinstance(value, list):
        texts = [text for each in value if (text := reasoning_text(each, depth - 1))]
        return "\n".join(texts) or None
    if depth and isinstance(value, dict):
        return next((text for name in _REASONING_MEMBERS if (text := reasoning_text(value.get(name), depth - 1))), None)
    return None


def read_parts(content: object, role: object = None) -> object:
    """Content as it is, but texts among its parts are parts too, and reasoning is of one type."""
    if role in ("tool", "function"):
        return read_result(content)
    if not isinstance(content, list):
        return content
    is_answer = role == "assistant"
    return [_seen(each, _ANSWER_PARTS) if is_answer and _is_part(each) else _part(each) for each in content]


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return part
    if kind in REASONING_PARTS or kind in SEALED_PARTS:
        return {"type": REASONING_PART, "text": "" if kind in SEALED_PARTS else reasoning_text(part) or ""}
    return part


def read_result(result: object) -> object:
    """The result of a tool: what is neither a text nor parts is shown as JSON."""
    if isinstance(result, list) and (not result or any(_is_part(each) for each in result)):
        return [_seen(each, _RESULT_PARTS) for each in result]
    return json_of(result)


def _is_part(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _seen(value: Any, known: frozenset[str]) -> Any:
    """A part of a known type, even one that a model of texts cannot be shown; anything else as JSON."""
    if _is_part(value) and (value["type"] in known or value["type"].startswith(UNSEEN_PREFIXES)):
        return _part(value)
    return {"type": "text", "text": json_of(value)}


def read_block(kind: str, block: dict[str, Any]) -> dict[str, Any]:
    """A block of Anthropic's API, of which a result may be no text, and a document may be one."""
    if kind == "tool_result" and not _is_blocks(block.get("content")):
        return {**block, "content": json_of(block.get("content"))}
    if kind == "document" and isinstance(source := block.get("source"), dict) and source.get("type") == "text":
        return {"type": "text", "text": source.get("data"), "cache_control": block.get("cache_control")}
    if kind in REASONING_PARTS:
        return {**block, "type": "thinking", "thinking": reasoning_text(block)}
    return {**block, "type": "redacted_thinking"} if kind in SEALED_PARTS else block


def _is_blocks(content: object) -> bool:
    return isinstance(content, list) and all(isinstance(each, dict) and "type" in each for each in content)


_CHOICES = {"any": "required", **{word: word for word in ("auto", "none", "required")}}


def read_choice(choice: object) -> object:
    """A choice of tools as one word, if another API's word or an object says no more."""
    word = choice.get("type") if isinstance(choice, dict) else choice
    return _CHOICES.get(word, choice) if isinstance(word, str) else choice


def read_nested_choice(choice: object) -> object:
    """A choice of tools; the name of a tool may stand beside its kind, as in the Responses API."""
    match choice:
        case {"type": ("function" | "custom") as kind, "name": name, **rest} if kind not in rest:
            return {"type": kind, kind: {"name": name}}
    return read_choice(choice)


_CALLS = ("function_call", "custom_tool_call", "tool_use", "tool-call", "tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output", "tool_result", "tool-result")
_IDS = ("call_id", "tool_use_id", "toolCallId", "tool_call_id", "id")


def _first(value: dict[str, Any], *names: str) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)


def _type(value: object) -> object:
    return value.get("type") if isinstance(value, dict) else None


def _calls_of(turn: dict[str, Any]) -> list[Any]:
    calls = turn.get("tool_calls")
    return calls if isinstance(calls, list) else []


def read_call(call: Any) -> Any:
    """A call as chat has it: an item of the Responses API, a block of Anthropic's, a part of Vercel's, LangChain's."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "type": "function"}
    if not isinstance(call, dict) or not isinstance(name := _first(call, "name", "toolName"), str):
        return call
    is_custom = call.get("type") == "custom_tool_call"
    kind, member = ("custom", "input") if is_custom else ("function", "arguments")
    given = _first(call, "arguments", "input", "args")
    return {"id": _first(call, *_IDS), "type": kind, kind: {"name": name, member: given}}


def _turn_of_result(result: dict[str, Any]) -> dict[str, Any]:
    output = _first(result, "output", "content", "result")
    if isinstance(output, dict) and "value" in output:  # Vercel's says of which type it is
        output = output["value"]
    return {"role": "tool", "tool_call_id": _first(result, *_IDS[:-1]), "content": output}


def read_turns(turns: object) -> object:
    """Turns as chat has them. Calls and reasoning that are items of their own become one turn."""
    if not isinstance(turns, list):
        return turns
    read: list[Any] = []
    is_open = False  # the last turn was made of items
    for turn in turns:
        kind = _type(turn) if isinstance(turn, dict) and turn.get("role") is None else None
        is_item = kind == "reasoning" or kind in _CALLS
        if is_item:
            made = {"reasoning_content": reasoning_text(turn)} if kind == "reasoning" else {"tool_calls": [turn]}
            turn = {"role": "assistant", **made}
        if is_open and isinstance(turn, dict) and turn.get("role") == "assistant":
            calls = [*_calls_of(read[-1]), *_calls_of(turn)] or None
            thoughts = [text for each in (read[-1], turn) if (text := each.get("reasoning_content"))]
            if all(isinstance(text, str) for text in thoughts):
                turn = {**turn, "reasoning_content": "\n".join(thoughts) or None}
            read[-1] = {**read[-1], **turn, "tool_calls": calls}
        else:
            read += [_turn_of_result(turn)] if kind in _RESULTS else _split(turn)
        is_open = is_item
    return read


def _split(turn: Any) -> Sequence[Any]:
    """A turn without the calls and results among its parts, and these."""
    content = turn.get("content") if isinstance(turn, dict) else None
    parts = content if isinstance(content, list) else []
    calls = [part for part in parts if _type(part) in _CALLS]
    results = [_turn_of_result(part) for part in parts if _type(part) in _RESULTS]
    if not (calls or results):
        return [turn]
    rest = [part for part in parts if _type(part) not in (*_CALLS, *_RESULTS)]
    if turn.get("role") == "assistant":
        return [{**turn, "content": rest or None, "tool_calls": [*_calls_of(turn), *calls]}, *results]
    return [*results, *([{**turn, "content": rest}] if rest else [])]


JsonText = Annotated[str, BeforeValidator(json_of)]
"""Arguments of a call, or another value that a client may have parsed or left out, as the text that it was."""

Reasoning = Annotated[str | None, BeforeValidator(reasoning_text)]
"""Reasoning in any form."""

CallId = Annotated[str, BeforeValidator(lambda id: str(id) if isinstance(id, int) else id)]
"""The id of a call. Some clients number them."""
