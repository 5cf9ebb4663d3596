"""POST /v1/chat/completions: turns a body into a task, and renders its events as JSON, streamed or plain.

Other APIs of conversations convert their bodies to chat bodies, and build their tasks with `chat_task` too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.wire.messages import FinishReason
from weft.server.apis.openai import render
from weft.server.apis.openai.calls import CallStream, add_calls
from weft.server.errors import InvalidRequestError, UnsupportedParameterError
from weft.server.formats.detection import OutputFormats
from weft.server.generate.events import End, Event, Reasoning, Report, Text, Token, TokenIds, WholeChoice
from weft.server.generate.pipeline import respond
from weft.server.http.context import Context, ServerContext, early_headers_while_loading
from weft.server.http.sse import TextEvent, encode_event
from weft.server.task import bodies as wire
from weft.server.task import validation
from weft.server.task.body import BodyRoute
from weft.server.task.messages import template_messages, text_of
from weft.server.task.parts import Spans
from weft.server.task.pictures import read_pictures
from weft.server.task.read_body import MAX_LOGPROBS, num_prompt_logprobs, read_task
from weft.server.task.request_options import Breakpoint, find_breakpoints
from weft.server.task.structured_output import structure_of
from weft.server.task.task import Chat, OutputWishes, Task
from weft.server.task.template_options import read_thinking, template_options
from weft.server.task.tool_use import tool_use

REFUSED_IN_CHAT: validation.Refused = {
    **validation.REFUSED_EVERYWHERE,
    "chat_template": validation.NOTHING,
    "echo": validation.OFF,
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
    "audio": validation.NOTHING,
    "web_search_options": validation.NOTHING,
}


async def chat_task(
    body: wire.ChatCompletionBody,
    request: Request,
    context: ServerContext,
    *,
    sent: BaseModel | None = None,
    refused: validation.Refused = REFUSED_IN_CHAT,
    breakpoints: Sequence[Breakpoint] | None = None,
    spans: Spans | None = None,
) -> Task:
    """Check every field of a conversation, and build the task.

    Args:
        sent: The body of another API from which `body` was made; its fields are refused or reported, not those of
            `body`.
        refused: Fields that the endpoint refuses; see `ignored_fields`.
        breakpoints: Those of another API's body; None: those of `body`.
        spans: Those that are in the messages of `body` already; None: none are.

    Raises:
        ApiError: A field is wrong, or the model is not served.
    """
    model, workers, size = await context.check_model(request, body.model), context.workers, len(await request.body())
    validation.require_task(model, "generate")
    logprobs = shown_logprobs(body)
    wishes = await workers.run_light(size, _read_wishes, body, model.formats, strict=context.settings.strict_params)
    validation.note_left_out(wishes.left_out)
    if breakpoints is None:
        breakpoints = find_breakpoints(body.messages, body.prompt_cache_options)
    options = template_options(body, model.tokenizer, wishes.variables)
    spans = Spans() if spans is None else spans
    messages = await workers.run_light(size, template_messages, body.messages, model.formats.tools, spans)
    await read_pictures(spans, model, request, context, is_cut=body.truncate_prompt_tokens is not None)
    return await read_task(
        body,
        request,
        context,
        refused,
        sent=sent,
        input=Chat(messages, options, breakpoints, spans=spans),
        wishes=wishes,
        max_tokens=0 if body.prewarm else _max_tokens(body),
        logprobs=logprobs,
        prompt_logprobs=num_prompt_logprobs(body),
        user=body.safety_identifier or body.user,
    )


def _read_wishes(body: wire.ChatCompletionBody, formats: OutputFormats, *, strict: bool) -> OutputWishes:
    """Read the fields about tools, structure and reasoning.

    Raises:
        InvalidRequestError: One of them is wrong.
        UnsupportedParameterError: There are tools, but the model has none, or its format of calls is not known.
    """
    use, left_out = tool_use(body, strict=strict)
    if use is not None and formats.tools is None:
        raise UnsupportedParameterError(f"{use.param} cannot be used: {formats.no_tools}", param=use.param)
    prediction = text_of(body.prediction.content, "prediction.content", "") if body.prediction else ""
    return OutputWishes(use, structure_of(body), read_thinking(body, formats), prediction, left_out)


def _max_tokens(body: wire.ChatCompletionBody) -> int | None:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(body, name)
    if max_tokens is not None:
        validation.check_range(name, max_tokens, 1, None)
    return max_tokens


def shown_logprobs(body: wire.ChatCompletionBody) -> int | None:
    """Number of most probable alternatives per token; None if logprobs were not requested."""
    top_logprobs = validation.check_range("top_logprobs", body.top_logprobs or 0, 0, MAX_LOGPROBS)
    if body.logprobs or body.logprob_token_ids:
        return top_logprobs
    if top_logprobs:
        raise InvalidRequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    return None


@dataclass(slots=True)
class _BegunChoice:
    """State of a choice that has begun."""

    index: int
    calls: CallStream | None
    text_event: TextEvent | None  # None if more than text can change between chunks
    token_ids: list[int] = field(default_factory=list)  # ids that no chunk has shown yet


class ChatRenderer(render.OpenAIRenderer):
    """Writes the answer to one HTTP request; does no I/O.

    Only `stream` mutates it: it keeps the state of choices that have begun.
    """

    def __init__(self, task: Task, options: render.RenderOptions, report: Report) -> None:
        """Prepare to write an answer; writes nothing yet."""
        super().__init__("chatcmpl", task, options, report)
        self._use = task.wishes.use
        self._shows_reasoning = task.wishes.thinking.is_shown
        self._choices: dict[int, _BegunChoice] = {}

    def stream(self, index: int, events: Sequence[Event]) -> bytes:
        """The chunks of a choice: the role first, then its new text and calls, then the finish reason."""
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = self._new_choice(index)
            return b"".join([self._role_event(index), *(self._written(choice, event) for event in events)])
        if len(events) == 1:
            return self._written(choice, events[0])
        return b"".join(self._written(choice, event) for event in events)

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """The whole plain answer."""
        answered = [self._whole_choice(choice) for choice in choices]
        completion = wire.ChatCompletion(**self._envelope, choices=answered, usage=self._usage())
        self._add_prompt(completion)
        completion.prompt_logprobs = self._prompt_logprobs()
        completion.kv_transfer_params = self._options.transfer
        return msgspec.json.encode(completion)

    def _usage_chunk(self) -> msgspec.Struct:
        chunk = self._chunk([])
        chunk.usage = self._usage()
        return chunk

    def _new_choice(self, index: int) -> _BegunChoice:
        text_event = None
        if self._options.only_text_changes:
            text_event = TextEvent(lambda text: self._chunk([wire.ChunkChoice(index, wire.ChunkDelta(content=text))]))
        return _BegunChoice(index, CallStream(self._use) if self._use else None, text_event)

    def _written(self, choice: _BegunChoice, event: Event) -> bytes:
        if isinstance(event, Text):
            if choice.text_event is not None:
                return choice.text_event.fill(event.text)
            delta = wire.ChunkDelta(content=event.text)
            return self._delta_event(choice, delta, event.text, self._logprobs(event.tokens))
        match event:
            case Reasoning():
                if not self._shows_reasoning:
                    return b""
                delta = wire.ChunkDelta(reasoning_content=event.text, reasoning=event.text)
                return self._delta_event(choice, delta, event.text)
            case TokenIds():
                choice.token_ids += event.token_ids
                return b""
            case End():
                return self._last_events(choice, event)
            case _:
                assert choice.calls is not None, "only parsers of tools find calls"
                return b"".join(self._delta_event(choice, delta, event[0]) for delta in choice.calls.deltas(event))

    def _role_event(self, index: int) -> bytes:
        role = wire.ChunkDelta(role="assistant", content="", refusal=None)
        chunk = self._chunk([wire.ChunkChoice(index, role)])
        chunk.obfuscation = self._obfuscation("")
        self._add_prompt(chunk)
        return encode_event(chunk)

    def _delta_event(
        self, choice: _BegunChoice, delta: wire.ChunkDelta, text: str, logprobs: wire.ChoiceLogprobs | None = None
    ) -> bytes:
        chunk_choice = wire.ChunkChoice(choice.index, delta, logprobs)
        if self._options.token_ids:
            chunk_choice.token_ids, choice.token_ids = choice.token_ids, []
        chunk = self._chunk([chunk_choice])
        chunk.obfuscation = self._obfuscation(text)
        return encode_event(chunk)

    def _last_events(self, choice: _BegunChoice, end: End) -> bytes:
        rest = choice.calls.rest() if choice.calls is not None else []
        events = [self._delta_event(choice, delta, "") for delta in rest]
        has_calls = choice.calls is not None and choice.calls.num_calls > 0
        last = wire.ChunkChoice(choice.index, wire.ChunkDelta(), finish_reason=self._finish_word(end, has_calls))
        last.stop_reason = UNSET if end.stop_reason is None else end.stop_reason
        if choice.token_ids:
            last.token_ids = choice.token_ids
        chunk = self._chunk([last])
        chunk.obfuscation = self._obfuscation("")
        return b"".join([*events, encode_event(chunk)])

    def _finish_word(self, end: End, has_calls: bool) -> str:
        if end.reason is FinishReason.STOP and has_calls:
            return "function_call" if self._use is not None and self._use.is_legacy else "tool_calls"
        return render.FINISH_WORDS[end.reason]

    def _whole_choice(self, choice: WholeChoice) -> wire.Choice:
        message = wire.AssistantMessage(choice.text)
        if choice.reasoning and self._shows_reasoning:
            message.reasoning_content = message.reasoning = choice.reasoning
        if choice.calls and self._use is not None:
            add_calls(message, choice.calls, self._use)
        answered = wire.Choice(
            choice.index,
            message,
            self._logprobs(choice.tokens, always=True),
            self._finish_word(choice.end, bool(choice.calls)),
            choice.end.stop_reason,
        )
        if self._options.token_ids:
            answered.token_ids = choice.token_ids
        return answered

    def _chunk(self, choices: list[wire.ChunkChoice]) -> wire.ChatCompletionChunk:
        counts = self._chunk_usage()
        return wire.ChatCompletionChunk(**self._envelope, choices=choices, usage=counts)

    def _logprobs(self, tokens: Sequence[Token], *, always: bool = False) -> wire.ChoiceLogprobs | None:
        """Log-probabilities of the tokens that are part of the text; None if there are none to show."""
        if self._options.logprobs is None:
            return None
        content = render.shown_tokens(tokens, self._options.logprobs, self._tokenizer)
        return wire.ChoiceLogprobs(content) if content or always else None


router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: wire.ChatCompletionBody, request: Request, context: Context) -> Response:
    """Answer a conversation, streamed or whole."""
    return await early_headers_while_loading(_answer(body, request, context), body, context, render.stream_error)


async def _answer(body: wire.ChatCompletionBody, request: Request, context: ServerContext) -> Response:
    task = await chat_task(body, request, context)
    renderer = partial(ChatRenderer, task, render.render_options(body, shown_logprobs(body)))
    return await respond(task, request, context, renderer)
