"""Reads what clients say again in forms of their own: arguments, ids, results of tools, parts, and reasoning.

Conversations come through frameworks and proxies, and a refused turn ends them, so each form that has one meaning is
read. What is read has the forms of OpenAI's API. Anything else stays as it is: the schemas say what is wrong with it.
"""

import json
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
_UNSEEN_PREFIXES = ("image", "input_", "audio", "video", "file", "document", "computer_screenshot", "container_upload")
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


def read_parts(content: object) -> object:
    """Content as it is, but texts among its parts are parts too, and reasoning is of one type."""
    return [_part(each) for each in content] if isinstance(content, list) else content


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
        return [_part(each) if _is_shown_as_part(each) else {"type": "text", "text": json_of(each)} for each in result]
    return json_of(result)


def _is_part(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _is_shown_as_part(value: Any) -> bool:
    """Whether it is a part of a known type, even one that a model of texts cannot be shown."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return False
    return kind in TEXT_PARTS or kind == "refusal" or kind.startswith(_UNSEEN_PREFIXES)


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


JsonText = Annotated[str, BeforeValidator(json_of)]
"""Arguments of a call, or another value that a client may have parsed or left out, as the text that it was."""

Reasoning = Annotated[str | None, BeforeValidator(reasoning_text)]
"""Reasoning in any form."""

CallId = Annotated[str, BeforeValidator(lambda id: str(id) if isinstance(id, int) else id)]
"""The id of a call. Some clients number them."""
