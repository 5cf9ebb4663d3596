"""Renders events in llama.cpp's shape: text, its tokens and probabilities; counts and timings at the end.

Does no I/O.
"""

from collections.abc import Sequence

import msgspec

from weft.engine.shared.messages import FinishReason
from weft.server.errors import ApiError
from weft.server.generate.events import End, Event, Part, Report, Text, Token, TokenIds, WholeChoice
from weft.server.http.error_shapes import llama_cpp_error
from weft.server.http.sse import encode_event
from weft.server.render.common import MIN_LOGPROB
from weft.server.render.stopwatch import Stopwatch
from weft.server.schemas.llama_cpp import CompletionProb, LlamaCppAnswer, Timings, TokenProb
from weft.server.task.task import Task


class LlamaCppRenderer:
    """Writes one answer. Only `stream` mutates it: it notes line breaks and the end."""

    def __init__(self, task: Task, num_probs: int, report: Report) -> None:
        """Prepare to write an answer with `num_probs` alternatives for each token (0: none); writes nothing yet."""
        self._report = report
        self._model = task.name
        self._tokenizer = task.model.tokenizer
        self._num_probs = num_probs
        self._watch = Stopwatch()
        self._has_new_line = False
        self._end: End | None = None

    def stream(self, index: int, events: Sequence[Event]) -> bytes:
        """An event for the new text."""
        self._watch.note_event()
        text, tokens, token_ids = "", list[Token](), list[int]()
        for event in events:
            match event:
                case Text():
                    text += event.text
                    tokens += event.tokens
                case TokenIds():
                    token_ids += event.token_ids
                case End():
                    self._end = event
        return encode_event(self._answer(text, tokens, token_ids)) if text or tokens or token_ids else b""

    def stream_end(self) -> bytes:
        """The event with counts and timings."""
        assert self._end is not None, "every choice ends"
        return encode_event(self._stopped(self._answer("", [], []), self._end))

    def stream_error(self, error: ApiError) -> bytes:
        """The error as the last event."""
        return b"data: " + llama_cpp_error(error) + b"\n\n"

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """The whole plain answer."""
        (choice,) = choices
        return msgspec.json.encode(
            self._stopped(self._answer(choice.text, choice.tokens, choice.token_ids), choice.end)
        )

    def _answer(self, text: str, tokens: Sequence[Token], token_ids: list[int]) -> LlamaCppAnswer:
        self._has_new_line = self._has_new_line or "\n" in text
        counts = self._report.counts()
        answer = LlamaCppAnswer(
            content=text,
            tokens=token_ids,
            stop=False,
            tokens_predicted=counts.output_tokens,
            tokens_evaluated=counts.prompt_tokens,
        )
        if self._num_probs:
            answer.completion_probabilities = [self._prob(token) for token in tokens if token.part is not Part.CUT]
        return answer

    def _stopped(self, answer: LlamaCppAnswer, end: End) -> LlamaCppAnswer:
        counts, prompt = self._report.counts(), self._report.prompt_of(0).prompt
        is_word = isinstance(end.stop_reason, str)
        answer.stop, answer.model, answer.truncated = True, self._model, False
        answer.prompt = prompt.text or ""
        answer.stop_type = "limit" if end.reason is FinishReason.LENGTH else "word" if is_word else "eos"
        answer.stopping_word = str(end.stop_reason) if is_word else ""
        answer.has_new_line = self._has_new_line
        answer.tokens_cached = counts.prompt_tokens + counts.output_tokens
        prompt_s, output_s = self._watch.read()
        new = counts.prompt_tokens - counts.cached_tokens
        answer.timings = Timings(counts.cached_tokens, *_rates(new, prompt_s), *_rates(counts.output_tokens, output_s))
        return answer

    def _prob(self, token: Token) -> CompletionProb:
        logprobs = token.logprobs
        assert logprobs is not None, "asked for, so the engine reports them"
        pairs = list(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))[: self._num_probs]
        top = [TokenProb(*self._spelling(token_id, logprob)) for token_id, logprob in pairs]
        return CompletionProb(*self._spelling(token.token_id, logprobs.logprob), top)

    def _spelling(self, token_id: int, logprob: float) -> tuple[int, str, list[int], float]:
        tokenizer = self._tokenizer
        return (
            token_id,
            tokenizer.token_text(token_id),
            list(tokenizer.token_bytes(token_id)),
            max(logprob, MIN_LOGPROB),
        )


def _rates(num: int, seconds: float) -> tuple[int, float, float, float]:
    """A number of tokens, milliseconds, milliseconds for each, tokens for each second."""
    return num, seconds * 1e3, seconds * 1e3 / max(1, num), num / seconds if seconds else 0.0
