"""Beam search as arithmetic: which continuations go on, which are finished, and when no better one can come.

The rules are those of transformers' `generate(num_beams=...)`: of the 2 * width most probable continuations those that
end count as finished if they are among the first `width`, the others go on; a finished one scores its log-probability
divided by length ** length_penalty, where the length counts output tokens, the one that ended it included. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.protocol import TokenLogprobs


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How finished beams are compared, and when the search ends.

    Attributes:
        length_penalty: Above 0 prefers longer outputs, below 0 shorter ones.
        early_stopping: True ends with the first `width` finished beams; False when the best live one, at its length
            now, scores no better than the worst of them; "never" when none of any length can.
    """

    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


class Beam(NamedTuple):
    """One output so far: its ids, what is known of each, and the sum of their log-probabilities."""

    token_ids: tuple[int, ...] = ()
    entries: tuple[TokenLogprobs, ...] = ()
    logprob: float = 0.0


class Beams:
    """The beams of one prompt, mutated by `advance` alone: `live` go on, the most probable first, all of one length."""

    def __init__(self, width: int, max_tokens: int, stop_ids: frozenset[int], options: BeamOptions) -> None:
        """Start with one empty beam; `width` and `max_tokens` are at least 1."""
        self.live = [Beam()]
        self._width = width
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._options = options
        self._finished: list[tuple[float, Beam]] = []  # at most width, best first

    def advance(self, rows: Sequence[TokenLogprobs]) -> None:
        """Extend every live beam by one token; `rows` hold its 2 * width most probable next ids, or all there are."""
        candidates = [
            (beam, token_id, logprob, row)
            for beam, row in zip(self.live, rows, strict=True)
            for token_id, logprob in zip(row.top_token_ids, row.top_logprobs, strict=True)
        ]
        candidates.sort(key=lambda candidate: -(candidate[0].logprob + candidate[2]))
        self.live = []
        for rank, (beam, token_id, logprob, row) in enumerate(candidates[: 2 * self._width]):
            entry = TokenLogprobs(logprob, row.top_token_ids, row.top_logprobs)
            longer = Beam((*beam.token_ids, token_id), (*beam.entries, entry), beam.logprob + logprob)
            if token_id not in self._stop_ids and len(longer.token_ids) < self._max_tokens:
                self.live.append(longer)
            elif rank < self._width:
                self._finished.append((self._score(longer, len(longer.token_ids)), longer))
        self.live = self.live[: self._width]
        self._finished.sort(key=lambda scored: -scored[0])
        self._finished = self._finished[: self._width]

    @property
    def is_done(self) -> bool:
        """Whether the search is over."""
        if not self.live:
            return True
        if len(self._finished) < self._width:
            return False
        if self._options.early_stopping is True:
            return True
        reaches_end = self._options.early_stopping == "never" and self._options.length_penalty > 0
        length = self._max_tokens if reaches_end else len(self.live[0].token_ids)
        return self._score(self.live[0], length) <= self._finished[-1][0]

    @property
    def best(self) -> list[Beam]:
        """The finished beams, best first."""
        return [beam for _, beam in self._finished]

    def _score(self, beam: Beam, length: int) -> float:
        return float(beam.logprob / length**self._options.length_penalty)
