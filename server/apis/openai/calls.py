"""Writes the calls of one choice, plain or streamed: ids, indices, and the three shapes of a call."""

import json
import secrets

from weft.server.generate.events import CallArguments, CallClosed, CallOpened
from weft.server.task.bodies import AnsweredCall, AssistantMessage, CalledCustom, CalledFunction, ChunkDelta
from weft.server.task.tool_use import CUSTOM_INPUT, ToolUse


class CallStream:
    """Turns the events of calls into deltas. Only its own methods mutate it.

    The id, the type and the whole name come first, once. Fragments of the arguments follow. The input of a custom tool
    is a string inside JSON, so it is sent whole, when the next call begins or the choice ends.

    Attributes:
        num_calls: Number of calls that have begun.
    """

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._is_custom = False  # about the latest call
        self._input: str | None = None  # input of a custom call that has ended but is not sent yet
        self.num_calls = 0

    def deltas(self, event: CallOpened | CallArguments | CallClosed) -> list[ChunkDelta]:
        """The deltas for one event."""
        match event:
            case CallOpened():
                rest = self.rest()
                self.num_calls += 1
                self._is_custom = event.name in self._use.custom_names
                return [*rest, self._head(event.name)]
            case CallArguments() if not self._is_custom:
                return [self._function_delta(CalledFunction(event.text))]
            case CallClosed() if self._is_custom:
                self._input = custom_input(event.arguments)
        return []

    def rest(self) -> list[ChunkDelta]:
        """The deltas of the latest call that are not sent yet."""
        if self._input is None:
            return []
        custom, self._input = CalledCustom(self._input), None
        return [ChunkDelta(tool_calls=[AnsweredCall(index=self.num_calls - 1, custom=custom)])]

    def _head(self, name: str) -> ChunkDelta:
        if self._is_custom:
            custom = CalledCustom("", name)
            call = AnsweredCall(index=self.num_calls - 1, id=new_call_id(), type="custom", custom=custom)
            return ChunkDelta(tool_calls=[call])
        return self._function_delta(CalledFunction("", name), is_head=True)

    def _function_delta(self, function: CalledFunction, *, is_head: bool = False) -> ChunkDelta:
        if self._use.is_legacy:
            return ChunkDelta(function_call=function)
        call = AnsweredCall(index=self.num_calls - 1, function=function)
        if is_head:
            call.id, call.type = new_call_id(), "function"
        return ChunkDelta(tool_calls=[call])


def add_calls(message: AssistantMessage, calls: list[CallClosed], use: ToolUse) -> None:
    """Put whole calls into a plain answer. Its content is null if the model wrote none."""
    message.content = message.content or None
    if use.is_legacy:
        message.function_call = CalledFunction(calls[0].arguments, calls[0].name)
    else:
        message.tool_calls = [_whole(call, use) for call in calls]


def _whole(call: CallClosed, use: ToolUse) -> AnsweredCall:
    if call.name in use.custom_names:
        custom = CalledCustom(custom_input(call.arguments), call.name)
        return AnsweredCall(id=new_call_id(), type="custom", custom=custom)
    return AnsweredCall(id=new_call_id(), type="function", function=CalledFunction(call.arguments, call.name))


def custom_input(arguments: str) -> str:
    """The input of a custom tool; the part that exists if the output ended within it."""
    for end in ("", "}", '"}'):
        try:
            value = json.loads(arguments + end)[CUSTOM_INPUT]
        except (ValueError, KeyError, TypeError):
            continue
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return arguments


def new_call_id() -> str:
    """An id for a call."""
    return f"call_{secrets.token_hex(12)}"
