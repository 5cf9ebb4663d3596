"""Decides which continuations of a beam search go on, which are finished, and when it ends.

The rules are those of transformers' `generate(num_beams=...)`. Of the 2 * width most probable continuations, those that
end count as finished if they are among the first `width`. Of those that do not end, the first `width` go on. A finished
one scores its log-probability divided by length ** length_penalty. The length counts output tokens, the one that ended
it included. Pure arithmetic.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.engine.shared.messages import BeamOptions, TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """One output so far: the beam that it extends, and its last id. So beams share their common beginning.

    Attributes:
        previous: None for the empty output, which has no last id.
        source: Index of `previous` among the live beams.
        entry: Log-probabilities at the last id.
        logprob: Sum of the log-probabilities of all ids.
    """

    previous: "Beam | None" = None
    source: int = 0
    token_id: int = -1
    entry: TokenLogprobs | None = None
    logprob: float = 0.0
    num_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        """All ids of the output."""
        return [beam.token_id for beam in self._path()]

    @property
    def entries(self) -> list[TokenLogprobs]:
        """Log-probabilities at each id."""
        return [beam.entry for beam in self._path() if beam.entry is not None]

    def _path(self) -> list["Beam"]:
        def backwards() -> Iterator[Beam]:
            beam = self
            while beam.previous is not None:
                yield beam
                beam = beam.previous

        return list(backwards())[::-1]


class Beams:
    """The beams of one prompt, changed only by `advance`. `live` go on, the most probable first, all of one length."""

    def __init__(
        self,
        width: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        options: BeamOptions,
        num_logprobs: int = 0,
    ) -> None:
        """Start with one empty beam. width and max_tokens are at least 1. num_logprobs alternatives are kept per id."""
        self.live = [Beam()]
        self._width = width
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._options = options
        self._num_logprobs = num_logprobs
        self._finished: list[tuple[float, Beam]] = []  # at most width, best first

    def advance(self, rows: Sequence[TokenLogprobs]) -> None:
        """Extend every live beam by one token.

        `rows` has one entry per live beam: its most probable next ids, the best first.
        An entry holds at least the larger of 2 * width and num_logprobs ids, or the whole vocabulary.
        """
        num_ids = len(rows[0].top_logprobs)
        sums = [beam.logprob + more for beam, row in zip(self.live, rows, strict=True) for more in row.top_logprobs]
        best = sorted(range(len(sums)), key=sums.__getitem__, reverse=True)  # of equals, the first comes first
        live = []
        for rank, index in enumerate(best[: 2 * self._width]):
            longer = self._longer(rows, *divmod(index, num_ids))
            if longer.token_id not in self._stop_ids and longer.num_tokens < self._max_tokens:
                live.append(longer)
            elif rank < self._width:
                self._finished.append((self._score(longer, longer.num_tokens), longer))
        self.live = live[: self._width]
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
        length = self._max_tokens if reaches_end else self.live[0].num_tokens
        return self._score(self.live[0], length) <= self._finished[-1][0]

    @property
    def best(self) -> list[Beam]:
        """The finished beams, best first."""
        return [beam for _, beam in self._finished]

    def _longer(self, rows: Sequence[TokenLogprobs], source: int, rank: int) -> Beam:
        beam, row, count = self.live[source], rows[source], self._num_logprobs
        logprob = row.top_logprobs[rank]
        entry = TokenLogprobs(logprob, row.top_token_ids[:count], row.top_logprobs[:count])
        return Beam(beam, source, row.top_token_ids[rank], entry, beam.logprob + logprob, beam.num_tokens + 1)

    def _score(self, beam: Beam, length: int) -> float:
        return float(beam.logprob / length**self._options.length_penalty)
