"""Renders events as the JSON of POST /v1/completions, streamed or plain.

Does no I/O. Each HTTP request has a renderer of its own.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from weft.engine.shared.messages import TokenLogprobs
from weft.server.generate.events import End, Event, Part, Report, Text, Token, TokenIds, WholeChoice
from weft.server.http.sse import TextEvent, encode_event
from weft.server.render.common import FINISH_WORDS, MIN_LOGPROB, OpenAIRenderer, RenderOptions
from weft.server.render.prompt_report import PromptEcho, echo_prompt
from weft.server.schemas import completions as wire
from weft.server.task.task import Task

_Row = tuple[int, int, TokenLogprobs | None]
"""(token id, offset of its text, log-probabilities or None for the first token of a prompt)."""


class CompletionRenderer(OpenAIRenderer):
    """Writes one answer. Only `stream` mutates it: it records the choices that have begun."""

    def __init__(self, task: Task, options: RenderOptions, report: Report, *, echo: bool) -> None:
        """Prepare to write an answer; writes nothing yet. O(prompt tokens) for `echo` and for logprobs."""
        super().__init__("cmpl", task, options, report)
        self._num_choices = task.num_made
        self._echo = echo
        self._echoes: list[PromptEcho] = []
        if echo or options.logprobs is not None:
            skips = task.text.skip_special_tokens
            self._echoes = [
                echo_prompt(each.prompt, self._tokenizer, skip_special_tokens=skips) for each in report.prompts
            ]
        self._text_events: dict[int, TextEvent | None] = {}  # by begun choice; None if more than text can change

    def stream(self, index: int, events: Sequence[Event]) -> bytes:
        """One chunk with what the choice gained; the echoed prompt comes first."""
        text_event = self._text_events.get(index)
        if text_event is not None and len(events) == 1 and isinstance(events[0], Text):
            return text_event.fill(events[0].text)
        written = b""
        is_first = index not in self._text_events
        if is_first:
            only_text = self._options.only_text_changes
            self._text_events[index] = TextEvent(lambda text: self._text_chunk(index, text)) if only_text else None
        if is_first and self._echo:
            choice = wire.CompletionChoice(index, self._echo_of(index).text, None, None)
            choice.logprobs = self._logprobs(self._prompt_rows(index))
            written += self._event(choice, is_first=True)
            is_first = False
        gained = wire.CompletionChoice(index, "", None, None)
        tokens: Sequence[Token] = ()
        for event in events:
            match event:
                case Text():
                    gained.text, tokens = event
                case TokenIds():
                    gained.token_ids = event.token_ids
                case End():
                    gained.finish_reason, gained.stop_reason = FINISH_WORDS[event.reason], event.stop_reason
        gained.logprobs = self._logprobs(self._output_rows(index, tokens))
        if self._options.token_ids and gained.token_ids is UNSET:
            gained.token_ids = []
        return written + self._event(gained, is_first=is_first)

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """The whole plain answer."""
        answered = [self._whole_choice(position, choice) for position, choice in enumerate(choices)]
        completion = wire.Completion(**self._envelope, choices=answered, usage=self._usage())
        completion.kv_transfer_params = self._options.transfer
        return msgspec.json.encode(completion)

    def _usage_chunk(self) -> msgspec.Struct:
        return wire.Completion(**self._envelope, choices=[], usage=self._usage())

    def _whole_choice(self, position: int, choice: WholeChoice) -> wire.CompletionChoice:
        text, rows = choice.text, self._output_rows(choice.index, choice.tokens)
        if self._echo:
            text = self._echo_of(choice.index).text + text
            rows = self._prompt_rows(choice.index) + rows
        end = choice.end
        answered = wire.CompletionChoice(
            position, text, self._logprobs(rows), FINISH_WORDS[end.reason], end.stop_reason
        )
        if self._options.token_ids:
            answered.token_ids = choice.token_ids
        self._add_prompt(answered, choice.index)
        answered.prompt_logprobs = self._prompt_logprobs(choice.index)
        return answered

    def _event(self, choice: wire.CompletionChoice, *, is_first: bool) -> bytes:
        if is_first:
            self._add_prompt(choice, choice.index)
        chunk = self._chunk(choice)
        chunk.obfuscation = self._obfuscation(choice.text)
        return encode_event(chunk)

    def _text_chunk(self, index: int, text: str) -> wire.Completion:
        return self._chunk(wire.CompletionChoice(index, text, None, None))

    def _chunk(self, choice: wire.CompletionChoice) -> wire.Completion:
        return wire.Completion(**self._envelope, choices=[choice], usage=self._chunk_usage())

    def _echo_of(self, index: int) -> PromptEcho:
        return self._echoes[index // self._num_choices]

    def _prompt_rows(self, index: int) -> list[_Row]:
        if self._options.logprobs is None:
            return []
        report = self._report.prompt_of(index)
        logprobs = [None, *(report.logprobs or [])]
        return list(zip(report.prompt.token_ids, self._echo_of(index).starts, logprobs, strict=True))

    def _output_rows(self, index: int, tokens: Sequence[Token]) -> list[_Row]:
        if self._options.logprobs is None:
            return []
        base = len(self._echo_of(index).text)
        return [(t.token_id, base + t.start, t.logprobs) for t in tokens if t.part is not Part.CUT]

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
        """The alternatives and the token itself, by text. If ids share a text, the most probable one counts."""
        top: dict[str, float] = {}
        count = self._options.logprobs
        pairs = zip(logprobs.top_token_ids[:count], logprobs.top_logprobs[:count], strict=True)
        for other_id, logprob in [*pairs, (token_id, logprobs.logprob)]:
            text = self._tokenizer.token_text(other_id)
            top[text] = max(logprob, top.get(text, MIN_LOGPROB))
        return top
