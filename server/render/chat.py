"""Deltas -> the JSON of POST /v1/chat/completions, streamed or plain. Pure; one renderer per HTTP request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from weft.engine.shared.messages import FinishReason
from weft.server.formats.parser import Kind, OutputParser, Piece
from weft.server.generate.answer import Answer
from weft.server.generate.choice_stream import Delta, Part, Token
from weft.server.generate.parsed_choice import Message, ParsedChoice
from weft.server.http.context import TextTokenizer
from weft.server.http.sse import TextEvent, event
from weft.server.render.answered_calls import CallStream, add_calls
from weft.server.render.common import (
    FINISH_WORDS,
    MIN_LOGPROB,
    Envelope,
    RenderOptions,
    chunk_usage,
    obfuscation,
    usage,
)
from weft.server.render.prompt_report import prompt_logprobs, prompt_text
from weft.server.request.tool_use import ToolUse
from weft.server.schemas import chat_completions as wire


@dataclass(frozen=True, slots=True)
class Reading:
    """How the text of an answer is read: a new parser for each choice, and what the tools are."""

    new_parser: Callable[[], OutputParser]
    tool_use: ToolUse | None
    shows_reasoning: bool = True


@dataclass(slots=True)
class _Choice:
    """What is remembered of a choice that has begun."""

    parsed: ParsedChoice | None
    calls: CallStream | None
    text_event: TextEvent | None  # none unless only text changes from chunk to chunk
    tokens: list[Token] = field(default_factory=list)  # of content that no chunk has shown yet
    token_ids: list[int] = field(default_factory=list)  # the same, of whatever they are part of


class ChatRenderer:
    """Writes one answer. Mutated by `chunks`, which remembers what has begun."""

    def __init__(
        self,
        answer: Answer,
        envelope: Envelope,
        options: RenderOptions,
        tokenizer: TextTokenizer,
        reading: Reading | None = None,
    ) -> None:
        """Nothing is written yet; without a reading all text is content."""
        self._answer = answer
        self._envelope = envelope
        self._options = options
        self._tokenizer = tokenizer
        self._reading = reading
        self._choices: dict[int, _Choice] = {}

    def chunks(self, index: int, delta: Delta) -> bytes:
        """The events for one delta: the role first, then what the choice gained, then the finish reason."""
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = self._new_choice(index)
            events = self._role_event(index)
        elif choice.parsed is None and choice.text_event is not None and delta.finish_reason is None:
            return choice.text_event.fill(delta.text)
        else:
            events = b""
        if self._options.token_ids:
            choice.token_ids += [token.token_id for token in delta.tokens]
        if choice.parsed is None:
            choice.tokens += delta.tokens
            if delta.text or delta.tokens:
                events += self._delta_event(index, choice, wire.ChunkDelta(content=delta.text), delta.text)
        else:
            pieces, tokens = choice.parsed.feed(delta)
            choice.tokens += tokens
            events += b"".join(self._piece_event(index, choice, piece) for piece in pieces)
        if delta.finish_reason is not None:
            events += self._last_events(index, choice, delta)
        return events

    def last_chunk(self) -> bytes:
        """The usage event, if it was asked for."""
        if not self._options.usage:
            return b""
        chunk = self._chunk([])
        chunk.usage = usage(self._answer.counts(), self._num_reasoning_tokens())
        return event(chunk)

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The plain answer from each choice's joined delta."""
        choices = [self._whole_choice(index, delta) for index, delta in enumerate(deltas)]
        counts = usage(self._answer.counts(), self._num_reasoning_tokens())
        completion = wire.ChatCompletion(**self._envelope, choices=choices, usage=counts)
        self._add_prompt(completion)
        token_ids, logprobs = self._answer.order.prompts[0].token_ids, self._answer.prompts[0].logprobs
        completion.prompt_logprobs = prompt_logprobs(token_ids, logprobs, self._options, self._tokenizer)
        return msgspec.json.encode(completion)

    def _new_choice(self, index: int) -> _Choice:
        text_event = None
        if self._options.only_text_changes:
            text_event = TextEvent(lambda text: self._text_chunk(index, text))
        if self._reading is None:
            return _Choice(None, None, text_event)
        calls = CallStream(self._reading.tool_use) if self._reading.tool_use else None
        return _Choice(ParsedChoice(self._reading.new_parser()), calls, text_event)

    def _role_event(self, index: int) -> bytes:
        role = wire.ChunkDelta(role="assistant", content="", refusal=None)
        chunk = self._chunk([wire.ChunkChoice(index, role)])
        chunk.obfuscation = obfuscation(self._options, "")
        self._add_prompt(chunk)
        return event(chunk)

    def _piece_event(self, index: int, choice: _Choice, piece: Piece) -> bytes:
        match piece.kind:
            case Kind.CONTENT:
                if choice.text_event is not None:
                    return choice.text_event.fill(piece.text)
                return self._delta_event(index, choice, wire.ChunkDelta(content=piece.text), piece.text)
            case Kind.REASONING:
                if self._reading is not None and not self._reading.shows_reasoning:
                    return b""
                delta = wire.ChunkDelta(reasoning_content=piece.text, reasoning=piece.text)
                return self._delta_event(index, choice, delta, piece.text)
            case _:
                assert choice.calls is not None, "only parsers of tools find calls"
                deltas = choice.calls.deltas(piece)
                return b"".join(self._delta_event(index, choice, delta, piece.text) for delta in deltas)

    def _delta_event(self, index: int, choice: _Choice, delta: wire.ChunkDelta, text: str = "") -> bytes:
        """An event with what the choice gained; log-probabilities go with content."""
        chunk_choice = wire.ChunkChoice(index, delta)
        if delta.content is not UNSET:
            chunk_choice.logprobs = self._logprobs(choice.tokens)
            choice.tokens = []
        if self._options.token_ids:
            chunk_choice.token_ids, choice.token_ids = choice.token_ids, []
        chunk = self._chunk([chunk_choice])
        chunk.obfuscation = obfuscation(self._options, text)
        return event(chunk)

    def _last_events(self, index: int, choice: _Choice, delta: Delta) -> bytes:
        events = b""
        if choice.calls is not None:
            events += b"".join(self._delta_event(index, choice, held) for held in choice.calls.close())
        last = wire.ChunkChoice(index, wire.ChunkDelta(), finish_reason=self._finish_word(delta, choice.parsed))
        last.stop_reason = UNSET if delta.stop_reason is None else delta.stop_reason
        last.logprobs = self._logprobs(choice.tokens)
        if choice.token_ids:
            last.token_ids = choice.token_ids
        chunk = self._chunk([last])
        chunk.obfuscation = obfuscation(self._options, "")
        return events + event(chunk)

    def _finish_word(self, delta: Delta, parsed: ParsedChoice | None) -> str:
        reason = delta.finish_reason or FinishReason.STOP
        if reason is FinishReason.STOP and parsed is not None and parsed.num_calls:
            assert self._reading is not None and self._reading.tool_use is not None, "only tools are called"
            return "function_call" if self._reading.tool_use.is_legacy else "tool_calls"
        return FINISH_WORDS[reason]

    def _whole_choice(self, index: int, delta: Delta) -> wire.Choice:
        choice = self._choices[index] = self._new_choice(index)
        message, tokens = wire.AssistantMessage(delta.text), delta.tokens
        if choice.parsed is not None and self._reading is not None:
            pieces, tokens = choice.parsed.feed(delta)
            message = self._message(pieces, self._reading)
        answered = wire.Choice(
            index,
            message,
            self._logprobs(tokens, always=True),
            self._finish_word(delta, choice.parsed),
            delta.stop_reason,
        )
        if self._options.token_ids:
            answered.token_ids = [token.token_id for token in delta.tokens]
        return answered

    def _message(self, pieces: Sequence[Piece], reading: Reading) -> wire.AssistantMessage:
        parts = Message()
        for piece in pieces:
            parts.add(piece)
        message = wire.AssistantMessage(parts.content)
        if parts.reasoning and reading.shows_reasoning:
            message.reasoning_content = message.reasoning = parts.reasoning
        if reading.tool_use is not None:
            add_calls(message, parts.calls, reading.tool_use)
        return message

    def _num_reasoning_tokens(self) -> int:
        return sum(c.parsed.num_reasoning_tokens for c in self._choices.values() if c.parsed is not None)

    def _add_prompt(self, answer: wire.ChatCompletion | wire.ChatCompletionChunk) -> None:
        """Show the prompt as ids and as text, as far as it was asked for."""
        token_ids = self._answer.order.prompts[0].token_ids
        answer.prompt_token_ids = token_ids if self._options.token_ids else UNSET
        answer.prompt_text = prompt_text(token_ids, self._options, self._tokenizer)

    def _text_chunk(self, index: int, text: str) -> wire.ChatCompletionChunk:
        return self._chunk([wire.ChunkChoice(index, wire.ChunkDelta(content=text))])

    def _chunk(self, choices: list[wire.ChunkChoice]) -> wire.ChatCompletionChunk:
        num_reasoning_tokens = self._num_reasoning_tokens() if self._options.usage_on_every_chunk else 0
        counts = chunk_usage(self._options, self._answer, num_reasoning_tokens)
        return wire.ChatCompletionChunk(**self._envelope, choices=choices, usage=counts)

    def _logprobs(self, tokens: Sequence[Token], *, always: bool = False) -> wire.ChoiceLogprobs | None:
        """Log-probabilities of the tokens that are part of the text; None when there are none to show."""
        if self._options.logprobs is None:
            return None
        content = [self._token(token) for token in tokens if token.part is Part.TEXT]
        return wire.ChoiceLogprobs(content) if content or always else None

    def _token(self, token: Token) -> wire.TokenLogprob:
        logprobs = token.logprobs
        assert logprobs is not None, "asked for, so the engine reports them"
        top = [
            wire.TopLogprob(*self._spelling(token_id, logprob))
            for token_id, logprob in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        ]
        return wire.TokenLogprob(*self._spelling(token.token_id, logprobs.logprob), top[: self._options.logprobs])

    def _spelling(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        tokenizer = self._tokenizer
        return tokenizer.token_text(token_id), max(logprob, MIN_LOGPROB), list(tokenizer.token_bytes(token_id))
