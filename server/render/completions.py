"""Deltas -> the JSON of POST /v1/completions, streamed or plain. Pure; one renderer per HTTP request."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from weft.engine.shared.messages import TokenLogprobs
from weft.server.generate.answer import Answer, PromptState
from weft.server.generate.choice_stream import Delta, Part
from weft.server.http.context import TextTokenizer
from weft.server.http.sse import TextEvent, event
from weft.server.render.common import (
    FINISH_WORDS,
    MIN_LOGPROB,
    Envelope,
    RenderOptions,
    chunk_usage,
    obfuscation,
    usage,
)
from weft.server.render.prompt_report import PromptEcho, prompt_logprobs, prompt_text
from weft.server.schemas import completions as wire
from weft.server.schemas.common import Usage

_Row = tuple[int, int, TokenLogprobs | None]
"""Token id, where its text begins, log-probabilities (None for the first token of a prompt)."""


class CompletionRenderer:
    """Writes one answer. Mutated by `chunks`, which remembers the choices that have begun."""

    def __init__(
        self,
        answer: Answer,
        envelope: Envelope,
        options: RenderOptions,
        tokenizer: TextTokenizer,
        echoes: Sequence[PromptEcho] | None,
        *,
        echo: bool,
    ) -> None:
        """`echoes`, by prompt, are needed for `echo` and for logprobs; None when neither is asked for."""
        self._answer = answer
        self._envelope = envelope
        self._options = options
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._echo = echo
        self._begun: set[int] = set()
        self._text_events: dict[int, TextEvent] = {}  # by choice that has begun; none unless only text changes

    def chunks(self, index: int, delta: Delta) -> bytes:
        """The events for one delta: the echoed prompt first, then what the choice gained."""
        if delta.finish_reason is None and (text_event := self._text_events.get(index)) is not None:
            return text_event.fill(delta.text)
        events = b""
        is_first = index not in self._begun
        self._begun.add(index)
        if is_first and self._options.only_text_changes:
            self._text_events[index] = TextEvent(lambda text: self._text_chunk(index, text))
        if is_first and self._echo:
            choice = wire.CompletionChoice(index, self._echo_of(index).text, None, None)
            choice.logprobs = self._logprobs(self._prompt_rows(index))
            events += self._event(choice, is_first=True)
            is_first = False
        choice = self._choice(index, delta.text, self._output_rows(index, delta), delta)
        return events + self._event(choice, is_first=is_first)

    def last_chunk(self) -> bytes:
        """The usage event, if it was asked for."""
        if not self._options.usage:
            return b""
        return event(self._completion([], usage(self._answer.counts())))

    def whole(self, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        """The plain answer from (choice in the engine, its joined delta), in the order of the wire."""
        choices = []
        for position, (index, delta) in enumerate(deltas):
            text, rows = delta.text, self._output_rows(index, delta)
            if self._echo:
                text = self._echo_of(index).text + text
                rows = self._prompt_rows(index) + rows
            choice = self._choice(position, text, rows, delta)
            self._add_prompt(choice, index)
            token_ids, logprobs = self._prompt_token_ids(index), self._prompt_state(index).logprobs
            choice.prompt_logprobs = prompt_logprobs(token_ids, logprobs, self._options, self._tokenizer)
            choices.append(choice)
        return msgspec.json.encode(self._completion(choices, usage(self._answer.counts())))

    def _choice(self, index: int, text: str, rows: Sequence[_Row], delta: Delta) -> wire.CompletionChoice:
        finish_reason = None if delta.finish_reason is None else FINISH_WORDS[delta.finish_reason]
        choice = wire.CompletionChoice(index, text, self._logprobs(rows), finish_reason, delta.stop_reason)
        if self._options.token_ids:
            choice.token_ids = [token.token_id for token in delta.tokens]
        return choice

    def _event(self, choice: wire.CompletionChoice, *, is_first: bool) -> bytes:
        options = self._options
        if is_first:
            self._add_prompt(choice, choice.index)
        completion = self._completion([choice], chunk_usage(options, self._answer))
        completion.obfuscation = obfuscation(options, choice.text)
        return event(completion)

    def _text_chunk(self, index: int, text: str) -> wire.Completion:
        choice = wire.CompletionChoice(index, text, None, None)
        return self._completion([choice], chunk_usage(self._options, self._answer))

    def _completion(self, choices: list[wire.CompletionChoice], counts: Usage | UnsetType | None) -> wire.Completion:
        return wire.Completion(**self._envelope, choices=choices, usage=counts)

    def _echo_of(self, index: int) -> PromptEcho:
        assert self._echoes is not None, "made whenever echo or logprobs were asked for"
        return self._echoes[index // self._answer.order.requests[0].num_choices]

    def _add_prompt(self, choice: wire.CompletionChoice, index: int) -> None:
        """Show the prompt as ids and as text, as far as it was asked for."""
        token_ids = self._prompt_token_ids(index)
        choice.prompt_token_ids = token_ids if self._options.token_ids else UNSET
        choice.prompt_text = prompt_text(token_ids, self._options, self._tokenizer)

    def _prompt_state(self, index: int) -> PromptState:
        return self._answer.prompts[index // self._answer.order.requests[0].num_choices]

    def _prompt_token_ids(self, index: int) -> list[int]:
        return self._answer.order.prompts[index // self._answer.order.requests[0].num_choices].token_ids

    def _prompt_rows(self, index: int) -> list[_Row]:
        if self._options.logprobs is None:
            return []
        logprobs = self._prompt_state(index).logprobs or []
        starts = self._echo_of(index).starts
        return list(zip(self._prompt_token_ids(index), starts, [None, *logprobs], strict=True))

    def _output_rows(self, index: int, delta: Delta) -> list[_Row]:
        if self._options.logprobs is None:
            return []
        base = len(self._echo_of(index).text)
        return [(t.token_id, base + t.start, t.logprobs) for t in delta.tokens if t.part is not Part.CUT]

    def _logprobs(self, rows: Sequence[_Row]) -> wire.CompletionLogprobs | None:
        if self._options.logprobs is None:
            return None
        return wire.CompletionLogprobs(
            [self._tokenizer.token_text(token_id) for token_id, _, _ in rows],
            [None if logprobs is None else max(logprobs.logprob, MIN_LOGPROB) for _, _, logprobs in rows],
            [None if logprobs is None else self._top(token_id, logprobs) for token_id, _, logprobs in rows],
            [start for _, start, _ in rows],
        )

    def _top(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The alternatives by text, and the token itself; of ids with one text, the most probable."""
        top: dict[str, float] = {}
        count = self._options.logprobs
        pairs = zip(logprobs.top_token_ids[:count], logprobs.top_logprobs[:count], strict=True)
        for other_id, logprob in [*pairs, (token_id, logprobs.logprob)]:
            text = self._tokenizer.token_text(other_id)
            top[text] = max(logprob, top.get(text, MIN_LOGPROB))
        return top
