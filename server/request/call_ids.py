"""Gives the earlier calls of a chat the ids that the chat templates of the model's family want."""

import re
from typing import Any

from weft.server.formats.parser import ToolFormat


def fit_call_ids(messages: list[dict[str, Any]], tools: ToolFormat | None) -> None:
    """Number the calls anew in the family's way, unless all of their ids fit it."""
    if tools is None or not tools.call_id:
        return
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    if all(re.fullmatch(tools.call_id_pattern, call.get("id", "")) for call in calls):
        return
    index, fitting = 0, dict[str, str]()
    for message in messages:
        for call in message.get("tool_calls", ()):
            made = tools.call_id.format(index=index, name=call["function"]["name"])
            fitting[call.get("id", "")] = call["id"] = made
            index += 1
        if "tool_call_id" in message:
            message["tool_call_id"] = fitting.get(message["tool_call_id"], message["tool_call_id"])
