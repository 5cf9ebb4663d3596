"""Deltas -> the JSON of POST /v1/chat/completions, streamed or plain. Pure; one renderer per HTTP request."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from engine.protocol import FinishReason
from server.answer import Answer
from server.choice_stream import Delta, Part, Token
from server.context import TextTokenizer
from server.prompt_report import prompt_logprobs, prompt_text
from server.render import FINISH_WORDS, MIN_LOGPROB, Envelope, RenderOptions, chunk_usage, obfuscation, usage
from server.schemas import chat_completions as wire
from server.sse import TextEvent, event


class ChatRenderer:
    """Writes one answer. Mutated by `chunks`, which remembers what has begun."""

    def __init__(self, answer: Answer, envelope: Envelope, options: RenderOptions, tokenizer: TextTokenizer) -> None:
        """Nothing is written yet."""
        self._answer = answer
        self._envelope = envelope
        self._options = options
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._text_events: dict[int, TextEvent] = {}  # by choice that has begun; none unless only text changes

    def chunks(self, index: int, delta: Delta) -> bytes:
        """The events for one delta: the role first, then the content, then the finish reason."""
        if delta.finish_reason is None and (text_event := self._text_events.get(index)) is not None:
            return text_event.fill(delta.text)
        events = b""
        if index not in self._begun:
            self._begun.add(index)
            if self._options.only_text_changes:
                self._text_events[index] = TextEvent(lambda text: self._text_chunk(index, text))
            role = wire.ChunkDelta(role="assistant", content="", refusal=None)
            events += self._event(wire.ChunkChoice(index, role), with_prompt=True)
        if delta.text or delta.tokens:
            choice = wire.ChunkChoice(index, wire.ChunkDelta(content=delta.text), self._logprobs(delta.tokens))
            if self._options.token_ids:
                choice.token_ids = [token.token_id for token in delta.tokens]
            events += self._event(choice, text=delta.text)
        if delta.finish_reason is not None:
            choice = wire.ChunkChoice(index, wire.ChunkDelta(), finish_reason=FINISH_WORDS[delta.finish_reason])
            choice.stop_reason = UNSET if delta.stop_reason is None else delta.stop_reason
            events += self._event(choice)
        return events

    def last_chunk(self) -> bytes:
        """The usage event, if it was asked for."""
        if not self._options.usage:
            return b""
        chunk = self._chunk([])
        chunk.usage = usage(self._answer.counts())
        return event(chunk)

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The plain answer from each choice's joined delta."""
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        completion = wire.ChatCompletion(**self._envelope, choices=choices, usage=usage(self._answer.counts()))
        self._add_prompt(completion)
        token_ids, logprobs = self._answer.order.prompts[0].token_ids, self._answer.prompts[0].logprobs
        completion.prompt_logprobs = prompt_logprobs(token_ids, logprobs, self._options, self._tokenizer)
        return msgspec.json.encode(completion)

    def _choice(self, index: int, delta: Delta) -> wire.Choice:
        choice = wire.Choice(
            index,
            wire.AssistantMessage(delta.text),
            self._logprobs(delta.tokens, always=True),
            FINISH_WORDS[delta.finish_reason or FinishReason.STOP],
            delta.stop_reason,
        )
        if self._options.token_ids:
            choice.token_ids = [token.token_id for token in delta.tokens]
        return choice

    def _event(self, choice: wire.ChunkChoice, *, text: str = "", with_prompt: bool = False) -> bytes:
        chunk = self._chunk([choice])
        chunk.obfuscation = obfuscation(self._options, text)
        if with_prompt:
            self._add_prompt(chunk)
        return event(chunk)

    def _add_prompt(self, answer: wire.ChatCompletion | wire.ChatCompletionChunk) -> None:
        """Show the prompt as ids and as text, as far as it was asked for."""
        token_ids = self._answer.order.prompts[0].token_ids
        answer.prompt_token_ids = token_ids if self._options.token_ids else UNSET
        answer.prompt_text = prompt_text(token_ids, self._options, self._tokenizer)

    def _text_chunk(self, index: int, text: str) -> wire.ChatCompletionChunk:
        return self._chunk([wire.ChunkChoice(index, wire.ChunkDelta(content=text))])

    def _chunk(self, choices: list[wire.ChunkChoice]) -> wire.ChatCompletionChunk:
        counts = chunk_usage(self._options, self._answer)
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
