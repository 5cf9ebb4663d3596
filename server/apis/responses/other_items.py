"""Items of types that this server does not make: what a model elsewhere did, in a conversation that goes on here.

A call with an output becomes a call of a tool, and the output its answer. Everything else becomes text. The members of
such an item may be anything.
"""

from typing import Any

import msgspec

from weft.server.apis.responses.schema import OtherItem, ResponseItem

MAX_OPAQUE_CHARS = 4096
"""A longer text without a space is an image or something sealed. The prompt has its length instead."""
_NOT_SHOWN = frozenset({"type", "id", "call_id", "status", "execution", "encrypted_content"})


def is_call(item: ResponseItem) -> bool:
    """Whether the item is a call, such as local_shell_call."""
    return (item.type or "").endswith("_call")


def is_output(item: ResponseItem) -> bool:
    """Whether the item is the output of a call, such as local_shell_call_output."""
    return (item.type or "").endswith("_output")


def call_id_of(item: ResponseItem) -> str:
    """The id that a call and its output share; an empty text if there is none."""
    return item.call_id or item.id or ""


def called(item: OtherItem) -> tuple[str, Any]:
    """The name and the arguments of a call."""
    members = _shown_members(item)
    arguments = members.get("arguments")
    return item.type.removesuffix("_call"), arguments if isinstance(arguments, dict) else members


def output_text(item: OtherItem) -> str:
    """The output of a call as text."""
    members = _shown_members(item)
    output = members.get("output")
    return output if isinstance(output, str) else _json(members if output is None else output)


def as_text(item: OtherItem) -> str:
    """The whole item as text."""
    return f"{item.type}: {_json(_shown_members(item))}"


def _shown_members(item: OtherItem) -> dict[str, Any]:
    return {name: _shortened(value) for name, value in item.members.items() if name not in _NOT_SHOWN}


def _shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_OPAQUE_CHARS and " " not in value:
        return f"({len(value)} characters)"
    if isinstance(value, dict):
        return {name: _shortened(inner) for name, inner in value.items()}
    return [_shortened(inner) for inner in value] if isinstance(value, list) else value


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
