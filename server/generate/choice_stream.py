"""The one text pipeline: outputs of the engine in, deltas of text out, for streamed and plain answers alike.

token ids -> detokenizer -> stop strings -> delta. Pure: no I/O, no clock. Invariants, for every way to split the
same ids into outputs: the concatenated texts are the same, each tracked token travels with the delta that completes
its text, and no text that may become part of a stop string is let go. Characters are counted from the start of the
output.

    released           produced
       v                  v
    ...|held by the stops |held by the detokenizer (an incomplete character)
"""

import enum
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from weft.engine.shared.messages import FinishReason, RequestOutput, TokenLogprobs


class TextScanner(Protocol):
    """Something that takes pieces and lets text go when it is sure of it."""

    def finish(self) -> str:
        """Let go of what is still held."""


class Detokenizer(TextScanner, Protocol):
    """Token ids of one output to text, a whole number of characters at a time. Mutated by its two methods alone."""

    def feed(self, token_id: int) -> str:
        """Take one id; return the text that is now certain, "" while a character is incomplete."""


class StopMatcher(TextScanner, Protocol):
    """Finds the first stop string; `matched` names it."""

    @property
    def matched(self) -> str | None:
        """The stop string that was found; None so far."""

    @property
    def num_content(self) -> int | None:
        """Characters of content that stay after a match, where the text is not all content; None: all of the text."""

    def feed(self, text: str) -> str:
        """Take text; return what cannot be part of a stop string. After a match, nothing more comes."""

    def pass_over(self, text: str) -> str:
        """Take text that is not to be searched, before any that is; return it."""


class Part(enum.Enum):
    """What a token is to the text: part of it, the token that ended it, or cut away by a stop string."""

    TEXT = enum.auto()
    END = enum.auto()
    CUT = enum.auto()


@dataclass(frozen=True, slots=True)
class Token:
    """One output token as a caller may see it: where its text starts, its log-probabilities if asked for."""

    token_id: int
    start: int
    logprobs: TokenLogprobs | None
    part: Part = Part.TEXT


class Delta(NamedTuple):
    """What a choice gained: text, and (if tracked) the tokens whose text this completes.

    Attributes:
        text: May be empty, with tokens or a finish reason.
        tokens: Tokens in order; empty unless tracked.
        finish_reason: None while the choice goes on; the delta that carries one is the last.
        stop_reason: The stop string or requested stop token id behind FinishReason.STOP.
        num_content: Characters of content that the whole choice keeps, where a stop string cut it; None: all.
    """

    text: str
    tokens: list[Token]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_content: int | None = None


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the output of a request becomes text.

    Attributes:
        stop_token_ids: The caller's own stop ids; only these are reported as the stop reason.
        include_stop: The text keeps the stop string or the stop token that ended it.
        min_tokens: Text of the first so many tokens is not searched for stop strings.
        track_tokens: Deltas carry tokens, for logprobs or token ids.
    """

    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    min_tokens: int = 0
    track_tokens: bool = False


class ChoiceStream:
    """The pipeline of one choice. Mutated by `feed` alone.

    Attributes:
        num_output_tokens: Tokens up to the end of the output or the match of a stop string.
        is_finished: A delta with a finish reason has been returned.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher | None, options: TextOptions) -> None:
        """Start with nothing produced; `stops` is None when there are no stop strings."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._options = options
        self._only_text = stops is None and not options.track_tokens
        self._pending: deque[tuple[int, Token]] = deque()  # (characters that must be released, token)
        self._num_produced = 0
        self._num_released = 0
        self.num_output_tokens = 0
        self._sum_logprobs = 0.0
        self.is_finished = False

    def feed(self, output: RequestOutput) -> Delta | None:
        """Take what the engine produced; None when nothing can be told yet.

        A delta that says STOP while `output` has no finish reason means that a stop string matched: the caller
        aborts the choice in the engine. Whatever is fed after the last delta is dropped.
        """
        if self.is_finished:
            return None
        if self._only_text and output.finish_reason is None and output.logprobs is None:  # the usual case, made short
            self.num_output_tokens += len(output.token_ids)
            text = "".join(map(self._detokenizer.feed, output.token_ids))
            return Delta(text, []) if text else None
        text = ""
        last = len(output.token_ids) - 1
        for i, token_id in enumerate(output.token_ids):
            is_stop_token = i == last and output.stop_token_id is not None
            text += self._feed_token(token_id, output.logprobs[i] if output.logprobs else None, is_stop_token)
            if self._has_matched:
                return self._last_delta(text, FinishReason.STOP, None)
        if output.finish_reason is None:
            self._num_released += len(text)
            tokens = self._complete_tokens()
            return Delta(text, tokens) if text or tokens else None
        text += self._through_stops(self._advance(self._detokenizer.finish()))
        return self._last_delta(text, output.finish_reason, output.stop_token_id)

    @property
    def mean_logprob(self) -> float:
        """Of the output tokens; 0 when there are none or the engine does not report log-probabilities."""
        return self._sum_logprobs / max(1, self.num_output_tokens)

    @property
    def _has_matched(self) -> bool:
        return self._stops is not None and self._stops.matched is not None

    def _feed_token(self, token_id: int, logprobs: TokenLogprobs | None, is_stop_token: bool) -> str:
        """Return the text that this token lets go."""
        start = self._num_produced
        self.num_output_tokens += 1
        if logprobs is not None:
            self._sum_logprobs += logprobs.logprob
        hidden = is_stop_token and not self._options.include_stop
        piece = "" if hidden else self._advance(self._detokenizer.feed(token_id))
        if self._options.track_tokens:
            # A token within a character has no text yet: it waits for the character that it begins or continues.
            end = self._num_produced if piece else start + 1
            part = Part.END if is_stop_token and not piece else Part.TEXT
            self._pending.append((end, Token(token_id, start, logprobs, part)))
        if self.num_output_tokens <= self._options.min_tokens:
            return self._stops.pass_over(piece) if self._stops is not None and piece else piece
        return self._through_stops(piece)

    def _advance(self, piece: str) -> str:
        self._num_produced += len(piece)
        return piece

    def _through_stops(self, piece: str) -> str:
        if self._stops is None or not piece:
            return piece
        return self._stops.feed(piece)

    def _complete_tokens(self) -> list[Token]:
        tokens: list[Token] = []
        while self._pending and self._pending[0][0] <= self._num_released:
            tokens.append(self._pending.popleft()[1])
        return tokens

    def _last_delta(self, text: str, finish_reason: FinishReason, stop_token_id: int | None) -> Delta:
        self.is_finished = True
        stop_reason: str | int | None = stop_token_id if stop_token_id in self._options.stop_token_ids else None
        if self._stops is not None and self._stops.matched is not None:
            finish_reason, stop_reason = FinishReason.STOP, self._stops.matched
            self._num_released += len(text)
            return Delta(text, self._cut_tokens(), finish_reason, stop_reason, self._stops.num_content)
        if self._stops is not None:
            text += self._stops.finish()
            if self._stops.matched is not None:  # in what came to light at the end
                finish_reason, stop_reason = FinishReason.STOP, self._stops.matched
        self._num_released += len(text)
        num_content = self._stops.num_content if self._stops is not None else None
        return Delta(text, [token for _, token in self._pending], finish_reason, stop_reason, num_content)

    def _cut_tokens(self) -> list[Token]:
        """Mark the tokens whose text was cut away altogether."""
        released = self._num_released
        return [t if t.start < released else replace(t, part=Part.CUT) for _, t in self._pending]
