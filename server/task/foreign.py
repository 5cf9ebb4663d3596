"""What another server's tools left in a conversation: members that may be anything, as text for the model."""

from collections.abc import Mapping
from typing import Any

import msgspec

MAX_OPAQUE_CHARS = 4096
"""A longer text without a space is an image or something sealed. The prompt has its length instead."""
_NOT_SHOWN = frozenset(
    {"type", "id", "call_id", "tool_use_id", "status", "execution", "encrypted_content", "cache_control"}
)


def shown_members(members: Mapping[str, Any]) -> dict[str, Any]:
    """The members that can mean something to the model, without ids and without what is opaque."""
    return {name: _shortened(value) for name, value in members.items() if name not in _NOT_SHOWN}


def foreign_text(kind: str, members: Mapping[str, Any]) -> str:
    """A part of a conversation of a type that is not known here, as text."""
    return f"{kind}: {json_text(shown_members(members))}"


def json_text(value: object) -> str:
    """A value as compact JSON."""
    return msgspec.json.encode(value).decode()


def _shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_OPAQUE_CHARS and " " not in value:
        return f"({len(value)} characters)"
    if isinstance(value, dict):
        return {name: _shortened(inner) for name, inner in value.items() if name != "encrypted_content"}
    return [_shortened(inner) for inner in value] if isinstance(value, list) else value
