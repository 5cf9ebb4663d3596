"""The calls of one choice on the wire, plain or streamed: ids, indices, and the three ways to write a call."""

import json
import secrets

from msgspec import UNSET

from weft.server.formats.parser import Kind, Piece
from weft.server.generate.parsed_choice import Call
from weft.server.request.tool_use import CUSTOM_INPUT, ToolUse
from weft.server.schemas.chat_completions import (
    AnsweredCall,
    AssistantMessage,
    CalledCustom,
    CalledFunction,
    ChunkDelta,
)


class CallStream:
    """Turns the pieces of calls into deltas. Mutated by its methods alone.

    The id, the type and the whole name come once, then fragments of the arguments. The input of a custom tool lies
    inside JSON, so it comes at once when its end is known.
    """

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._index = -1
        self._custom: str | None = None  # arguments of the custom call that is open

    def deltas(self, piece: Piece) -> list[ChunkDelta]:
        """What a piece of a call adds."""
        if piece.kind is Kind.CALL:
            closing = self.close()
            self._index += 1
            return [*closing, self._head(piece.text)]
        if self._custom is not None:
            self._custom += piece.text
            return []
        return [_function_delta(self._use, self._index, CalledFunction(piece.text))]

    def close(self) -> list[ChunkDelta]:
        """What is still held."""
        if self._custom is None:
            return []
        custom, self._custom = CalledCustom(custom_input(self._custom)), None
        return [ChunkDelta(tool_calls=[AnsweredCall(index=self._index, custom=custom)])]

    def _head(self, name: str) -> ChunkDelta:
        if name in self._use.custom_names:
            self._custom = ""
            call = AnsweredCall(index=self._index, id=_new_id(), type="custom", custom=CalledCustom("", name))
            return ChunkDelta(tool_calls=[call])
        return _function_delta(self._use, self._index, CalledFunction("", name), is_head=True)


def _function_delta(use: ToolUse, index: int, function: CalledFunction, *, is_head: bool = False) -> ChunkDelta:
    if use.is_legacy:
        return ChunkDelta(function_call=function)
    call = AnsweredCall(index=index, function=function)
    if is_head:
        call.id, call.type = _new_id(), "function"
    return ChunkDelta(tool_calls=[call])


def add_calls(message: AssistantMessage, calls: list[Call], use: ToolUse) -> None:
    """Put whole calls into a plain answer, which then has no content unless the model wrote some."""
    if not calls:
        return
    message.content = message.content or None
    if use.is_legacy:
        message.function_call = CalledFunction(calls[0].arguments, calls[0].name)
        return
    message.tool_calls = [_whole(call, use) for call in calls]


def _whole(call: Call, use: ToolUse) -> AnsweredCall:
    if call.name in use.custom_names:
        custom = CalledCustom(custom_input(call.arguments), call.name)
        return AnsweredCall(id=_new_id(), type="custom", function=UNSET, custom=custom)
    return AnsweredCall(id=_new_id(), type="function", function=CalledFunction(call.arguments, call.name))


def custom_input(arguments: str) -> str:
    """The input of a custom tool, as far as it goes where the model did not come to its end."""
    for end in ("", "}", '"}'):
        try:
            value = json.loads(arguments + end)[CUSTOM_INPUT]
        except (ValueError, KeyError, TypeError):
            continue
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return arguments


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
