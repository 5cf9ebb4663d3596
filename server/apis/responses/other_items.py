"""Items of types that this server does not make: what a model elsewhere did, in a conversation that goes on here.

A call with an output becomes a call of a tool, and the output its answer. Everything else becomes text. The members of
such an item may be anything.
"""

from typing import Any

from weft.server.apis.responses.schema import OtherItem, ResponseItem
from weft.server.task.foreign import json_text, shown_members


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
    members = shown_members(item.members)
    arguments = members.get("arguments")
    return item.type.removesuffix("_call"), arguments if isinstance(arguments, dict) else members


def output_text(item: OtherItem) -> str:
    """The output of a call as text."""
    members = shown_members(item.members)
    output = members.get("output")
    return output if isinstance(output, str) else json_text(members if output is None else output)
