"""POST /v1/messages and /v1/messages/count_tokens: turns Anthropic's bodies into tasks, and events into its messages.

A message has content blocks. Streamed, it is a sequence of named events:

    message_start (content_block_start content_block_delta* content_block_stop)* message_delta message_stop

A block ends where the next one begins.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.wire.messages import FinishReason
from weft.server.apis.anthropic import schema as wire
from weft.server.apis.anthropic.body import REFUSED_IN_MESSAGES, RENAMED, Conversation, conversation, count_conversation
from weft.server.apis.anthropic.schema import CountTokensBody, MessagesBody, TokensCount
from weft.server.apis.openai.chat import chat_task
from weft.server.apis.openai.pages import json_answer
from weft.server.apis.openai.tokenize import count_chat_tokens
from weft.server.errors import ApiError
from weft.server.generate import events as generated
from weft.server.generate.events import CallArguments, CallClosed, CallOpened, Event, Reasoning, Text
from weft.server.generate.pipeline import respond
from weft.server.http.context import Context, ServerContext, early_headers_while_loading
from weft.server.http.middleware import anthropic_error
from weft.server.http.sse import Framing, TextEvent, encode_event
from weft.server.task.body import BodyRoute
from weft.server.task.task import Chat, Task
from weft.server.task.validation import ignored_header, note_left_out, renamed, renaming

FRAMING = Framing(ping=b'event: ping\ndata: {"type": "ping"}\n\n', after_ping=b"")


def stream_error(error: ApiError, request_id: str) -> bytes:
    """The last event of a stream that failed."""
    return b"event: error\ndata: " + anthropic_error(error, request_id) + b"\n\n"


class MessagesRenderer:
    """Writes one answer. Does no I/O. Only `stream` mutates it: it keeps the open block and how the answer ended."""

    def __init__(self, task: Task, request_id: str, report: generated.Report) -> None:
        """Prepare to write an answer; writes nothing yet."""
        self._report = report
        self._request_id = request_id
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = task.name
        self._max_tokens = task.sampling.max_tokens
        self._is_priority = task.service.tier == "priority"
        self._shows_reasoning = task.wishes.thinking.is_shown
        self._is_started = False
        self._num_blocks = 0
        self._open: str | None = None  # the kind of the open block
        self._text_event: TextEvent | None = None  # of the open block of text
        self._thought = hashlib.blake2s()
        self._has_calls = False
        self._end: wire.MessageEnd | None = None

    def stream(self, index: int, events: Sequence[Event]) -> bytes:
        """The start of the message, once, and the events for what it gained."""
        head = b"" if self._is_started else _event(wire.MessageStart(self._message([], None)))
        self._is_started = True
        return head + b"".join(map(self._written, events))

    def stream_end(self) -> bytes:
        """How the message ended, and the last event."""
        assert self._end is not None, "every choice ends"
        usage = self._usage(is_whole=False)
        return _event(wire.MessageDelta(self._end, usage)) + _event(wire.MessageStop())

    def stream_error(self, error: ApiError) -> bytes:
        """The error as the last event."""
        return stream_error(error, self._request_id)

    def whole(self, choices: Sequence[generated.WholeChoice]) -> bytes:
        """The whole plain answer: reasoning, text, calls."""
        (choice,) = choices
        content: list[wire.AnswerBlock] = []
        if choice.reasoning and self._shows_reasoning:
            self._thought.update(choice.reasoning.encode("utf-8", "replace"))
            content.append(wire.ThinkingBlock(choice.reasoning, self._thought.hexdigest()))
        if choice.text:
            content.append(wire.TextBlock(text=choice.text))
        content += [wire.ToolUseBlock(_new_id(), call.name, _input(call.arguments)) for call in choice.calls]
        self._has_calls = bool(choice.calls)
        return msgspec.json.encode(self._message(content, self._message_end(choice.end)))

    def _written(self, event: Event) -> bytes:
        match event:
            case Text():
                return self._text(event.text)
            case Reasoning():
                if not self._shows_reasoning:
                    return b""
                self._thought.update(event.text.encode("utf-8", "replace"))
                return self._opened(wire.ThinkingBlock("", "")) + self._delta(wire.ThinkingDelta(event.text))
            case CallOpened():
                self._has_calls = True
                return self._closed() + self._opened(wire.ToolUseBlock(_new_id(), event.name, {}))
            case CallArguments():
                return self._delta(wire.InputDelta(event.text))
            case CallClosed():
                return self._closed()
            case generated.End():
                self._end = self._message_end(event)
                return self._closed()
            case _:
                return b""

    def _text(self, text: str) -> bytes:
        if not text:
            return b""
        opened = self._opened(wire.TextBlock(text=""))
        if self._text_event is None:
            index = self._num_blocks - 1
            self._text_event = TextEvent(
                lambda text: wire.BlockDelta(index, wire.TextDelta(text)), "content_block_delta"
            )
        return opened + self._text_event.fill(text)

    def _opened(self, block: wire.AnswerBlock) -> bytes:
        """Open a block, unless one of its kind is open."""
        kind = block.__struct_config__.tag
        if kind == self._open:
            return b""
        closed = self._closed()
        self._open = str(kind)
        self._num_blocks += 1
        return closed + _event(wire.BlockStart(self._num_blocks - 1, block))

    def _closed(self) -> bytes:
        """End the open block, if there is one."""
        if self._open is None:
            return b""
        is_thought = self._open == "thinking"
        signature = self._delta(wire.SignatureDelta(self._thought.hexdigest())) if is_thought else b""
        self._open = self._text_event = None
        return signature + _event(wire.BlockStop(self._num_blocks - 1))

    def _delta(self, delta: Any) -> bytes:
        return _event(wire.BlockDelta(self._num_blocks - 1, delta))

    def _message_end(self, end: generated.End) -> wire.MessageEnd:
        if end.reason is FinishReason.LENGTH:
            is_full = self._max_tokens is None or self._report.counts().output_tokens < self._max_tokens
            return wire.MessageEnd("model_context_window_exceeded" if is_full else "max_tokens", None)
        if isinstance(end.stop_reason, str):
            return wire.MessageEnd("stop_sequence", end.stop_reason)
        return wire.MessageEnd("tool_use" if self._has_calls else "end_turn", None)

    def _message(self, content: list[wire.AnswerBlock], end: wire.MessageEnd | None) -> wire.AnsweredMessage:
        return wire.AnsweredMessage(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=end.stop_reason if end else None,
            stop_sequence=end.stop_sequence if end else None,
            usage=self._usage(is_whole=True),
        )

    def _usage(self, *, is_whole: bool) -> wire.MessageUsage:
        counts = self._report.counts()
        usage = wire.MessageUsage(
            input_tokens=counts.prompt_tokens - counts.cached_tokens - counts.cache_write_tokens,
            cache_creation_input_tokens=counts.cache_write_tokens,
            cache_read_input_tokens=counts.cached_tokens,
            output_tokens=counts.output_tokens,
            output_tokens_details=wire.ThinkingTokens(counts.reasoning_tokens),
        )
        if is_whole:
            usage.cache_creation = wire.CacheCreation(counts.cache_write_tokens)
            usage.service_tier = "priority" if self._is_priority else "standard"
        return usage


def _event(message: msgspec.Struct) -> bytes:
    return encode_event(message, str(message.__struct_config__.tag))


def _input(arguments: str) -> dict[str, Any]:
    """The input of a call; empty if the output ended within it."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _new_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


router = APIRouter(route_class=BodyRoute)


@router.post("/v1/messages")
async def create_message(body: MessagesBody, request: Request, context: Context) -> Response:
    """Answer a conversation, streamed or whole."""
    answer, error = _answer(body, request, context), partial(stream_error, request_id=request.state.request_id)
    return await early_headers_while_loading(answer, body, context, error, FRAMING)


async def _answer(body: MessagesBody, request: Request, context: ServerContext) -> Response:
    with renaming(RENAMED):
        size, strict = len(await request.body()), context.settings.strict_params
        made = await context.workers.run_light(size, conversation, body, strict=strict)
        task = await _task(made, body, request, context)
        new_renderer = partial(MessagesRenderer, task, request.state.request_id)
        return await respond(task, request, context, new_renderer, FRAMING)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensBody, request: Request, context: Context) -> Response:
    """Count the tokens of a conversation."""
    with renaming(RENAMED):
        size, strict = len(await request.body()), context.settings.strict_params
        made = await context.workers.run_light(size, count_conversation, body, strict=strict)
        task = await _task(made, body, request, context)
        assert isinstance(task.input, Chat)
        answer = TokensCount(await count_chat_tokens(task.input, task.model, task.size, context.workers))
    return json_answer(answer, ignored_header(task.ignored))


async def _task(made: Conversation, body: CountTokensBody, request: Request, context: ServerContext) -> Task:
    note_left_out(made.left_out)
    task = await chat_task(
        made.chat,
        request,
        context,
        sent=body,
        refused=REFUSED_IN_MESSAGES,
        breakpoints=made.breakpoints,
        spans=made.spans,
    )
    effort = {"reasoning_effort": "thinking" if body.thinking else "output_config.effort"}
    ignored = [*made.left_out, *(renamed(effort.get(name, name), RENAMED) for name in task.ignored)]
    return replace(task, ignored=ignored, names=RENAMED)
