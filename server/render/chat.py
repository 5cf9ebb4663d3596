"""Renders events as the JSON of POST /v1/chat/completions, streamed or plain.

Does no I/O. Each HTTP request has a renderer of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from weft.engine.shared.messages import FinishReason
from weft.server.generate.events import End, Event, Reasoning, Report, Text, Token, TokenIds, WholeChoice
from weft.server.http.sse import TextEvent, encode_event
from weft.server.render.answered_calls import CallStream, add_calls
from weft.server.render.common import FINISH_WORDS, OpenAIRenderer, RenderOptions, shown_tokens
from weft.server.schemas import chat_completions as wire
from weft.server.task.task import Task


@dataclass(slots=True)
class _Choice:
    """State of a choice that has begun."""

    index: int
    calls: CallStream | None
    text_event: TextEvent | None  # None if more than text can change between chunks
    token_ids: list[int] = field(default_factory=list)  # ids that no chunk has shown yet


class ChatRenderer(OpenAIRenderer):
    """Writes one answer. Only `stream` mutates it: it keeps the state of choices that have begun."""

    def __init__(self, task: Task, options: RenderOptions, report: Report) -> None:
        """Prepare to write an answer; writes nothing yet."""
        super().__init__("chatcmpl", task, options, report)
        self._use = task.wishes.use
        self._shows_reasoning = task.wishes.thinking.is_shown
        self._choices: dict[int, _Choice] = {}

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

    def _new_choice(self, index: int) -> _Choice:
        text_event = None
        if self._options.only_text_changes:
            text_event = TextEvent(lambda text: self._chunk([wire.ChunkChoice(index, wire.ChunkDelta(content=text))]))
        return _Choice(index, CallStream(self._use) if self._use else None, text_event)

    def _written(self, choice: _Choice, event: Event) -> bytes:
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
        self, choice: _Choice, delta: wire.ChunkDelta, text: str, logprobs: wire.ChoiceLogprobs | None = None
    ) -> bytes:
        chunk_choice = wire.ChunkChoice(choice.index, delta, logprobs)
        if self._options.token_ids:
            chunk_choice.token_ids, choice.token_ids = choice.token_ids, []
        chunk = self._chunk([chunk_choice])
        chunk.obfuscation = self._obfuscation(text)
        return encode_event(chunk)

    def _last_events(self, choice: _Choice, end: End) -> bytes:
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
        return FINISH_WORDS[end.reason]

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
        content = shown_tokens(tokens, self._options.logprobs, self._tokenizer)
        return wire.ChoiceLogprobs(content) if content or always else None
