"""The text pipeline of one choice: turns engine outputs into events, for streamed and plain answers.

    token ids -> detokenizer -> stop strings -> events

If the text can hold reasoning or calls, a parser (`ParsedChoice`) replaces the stop strings. Pure: no I/O, no clock.
Three invariants hold for every way to split the same ids into outputs:

1. The concatenated texts are the same.
2. Each tracked token travels with the event that completes its text.
3. Text that may become part of a stop string is never released.

Characters are counted from the start of the output.

    released           produced
       v                  v
    ...|held by the stops |held by the detokenizer (an incomplete character)
"""

from collections import deque
from dataclasses import replace

from weft.engine.wire.messages import FinishReason, TokenLogprobs, TokensOutput
from weft.server.generate.events import End, Event, Part, Text, Token, TokenIds
from weft.server.generate.output_plan import ParsedChoice
from weft.server.task.task import TextOptions
from weft.server.text.detokenizer import StopStrings
from weft.server.text.text_tokenizer import Detokenizer


class ChoiceStream:
    """The pipeline of one choice. Only `feed` mutates it.

    Attributes:
        num_output_tokens: Tokens up to the end of the output or the match of a stop string.
        is_finished: `End` has been returned.
    """

    def __init__(self, detokenizer: Detokenizer, options: TextOptions, parsed: ParsedChoice | None = None) -> None:
        """Start with no output. If `parsed` is None, all text is content."""
        self._detokenizer = detokenizer
        self._options = options
        self._parsed = parsed
        has_stops = options.stops and parsed is None
        self._stops = StopStrings(options.stops, options.include_stop) if has_stops else None
        self._only_text = self._stops is None and not options.tracks_tokens
        self._pending: deque[tuple[int, Token]] = deque()  # (characters that must be released, token)
        self._num_produced = 0
        self._num_released = 0
        self.num_output_tokens = 0
        self._sum_logprobs = 0.0
        self.is_finished = False

    def feed(self, output: TokensOutput) -> list[Event] | None:
        """Take an output of the engine; return its events, or None if nothing can be released yet.

        If the result has an `End` but `output` has no finish reason, a stop string matched. The caller must then abort
        the choice in the engine. Later outputs are dropped.
        """
        if self.is_finished:
            return None
        if self._only_text and output.finish_reason is None and output.logprobs is None:  # fast path: the usual case
            self.num_output_tokens += len(output.token_ids)
            text = "".join(map(self._detokenizer.feed, output.token_ids))
            if not text:
                return None
            return [Text(text)] if self._parsed is None else self._parse(self._parsed, text, [], None)
        text, tokens, end = self._read(output)
        if not (text or tokens or end):
            return None
        self.is_finished = end is not None
        if self._parsed is not None:
            return self._parse(self._parsed, text, tokens, end)
        events: list[Event] = [Text(text, tokens)] if text or tokens else []
        if tokens and self._options.tells_ids:
            events.insert(0, TokenIds([token.token_id for token in tokens]))
        if end is not None:
            events.append(end)
        return events

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tracked tokens that were spent on reasoning."""
        return self._parsed.num_reasoning_tokens if self._parsed is not None else 0

    @property
    def mean_logprob(self) -> float:
        """Mean over the output tokens; 0 if there are none or the engine reports no log-probabilities."""
        return self._sum_logprobs / max(1, self.num_output_tokens)

    def _parse(self, parsed: ParsedChoice, text: str, tokens: list[Token], end: End | None) -> list[Event]:
        events = parsed.feed(text, tokens, end)
        if parsed.has_matched:
            self.is_finished = True
            self.num_output_tokens = parsed.num_tokens
        return events

    def _read(self, output: TokensOutput) -> tuple[str, list[Token], End | None]:
        """The text that is released, its tokens, and the end if the choice has ended."""
        text = ""
        last = len(output.token_ids) - 1
        for i, token_id in enumerate(output.token_ids):
            is_stop_token = i == last and output.stop_token_id is not None
            text += self._feed_token(token_id, output.logprobs[i] if output.logprobs else None, is_stop_token)
            if self._has_matched:
                break
        else:
            if output.finish_reason is None:
                self._num_released += len(text)
                return text, self._complete_tokens(), None
            text += self._through_stops(self._advance(self._detokenizer.finish()))
        if self._stops is not None and self._has_matched:
            self._num_released += len(text)
            return text, self._cut_tokens(), End(FinishReason.STOP, self._stops.matched)
        if self._stops is not None:
            text += self._stops.finish()
        assert output.finish_reason is not None, "else it has gone on above"
        stop_token_id = output.stop_token_id if output.stop_token_id in self._options.stop_token_ids else None
        return text, [token for _, token in self._pending], End(output.finish_reason, stop_token_id)

    @property
    def _has_matched(self) -> bool:
        return self._stops is not None and self._stops.matched is not None

    def _feed_token(self, token_id: int, logprobs: TokenLogprobs | None, is_stop_token: bool) -> str:
        """Return the text that is released after this token."""
        start = self._num_produced
        self.num_output_tokens += 1
        if logprobs is not None:
            self._sum_logprobs += logprobs.logprob
        hidden = is_stop_token and not self._options.include_stop
        piece = "" if hidden else self._advance(self._detokenizer.feed(token_id))
        if self._options.tracks_tokens:
            # A token within a character has no text yet. It waits until its character is complete.
            end = self._num_produced if piece else start + 1
            part = Part.END if is_stop_token and not piece else Part.TEXT
            self._pending.append((end, Token(token_id, start, logprobs, part)))
        return piece if self.num_output_tokens <= self._options.min_tokens else self._through_stops(piece)

    def _advance(self, piece: str) -> str:
        self._num_produced += len(piece)
        return piece

    def _through_stops(self, piece: str) -> str:
        return self._stops.feed(piece) if self._stops is not None and piece else piece

    def _complete_tokens(self) -> list[Token]:
        tokens: list[Token] = []
        while self._pending and self._pending[0][0] <= self._num_released:
            tokens.append(self._pending.popleft()[1])
        return tokens

    def _cut_tokens(self) -> list[Token]:
        """Mark the tokens whose whole text was cut away."""
        released = self._num_released
        return [t if t.start < released else replace(t, part=Part.CUT) for _, t in self._pending]
