"""Runs a beam search, in which each beam is a request to the scheduler.

A beam computes its last id and then has its row: the most probable next ids. Once every beam has its row, the best
continuations are chosen and the beams are formed anew. The first continuation of a beam goes on in its blocks. Every
other one shares these blocks and copies the last one if it is partly filled. A beam without continuation gives its
blocks back. The choices are sent whole, at the end, best first. Reaches queues and blocks only through the scheduler.

A search may be wider than there is room. If none of its beams can compute anything, beams that have their row give
their places to others (`give_way`). Their rows are kept, and their continuations wait to be admitted like any request.
"""

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from typing_extensions import override

from weft.engine.batch import StepResult
from weft.engine.request import Continuation, Outputs, Request, RequestKey, RequestStatus
from weft.engine.schedule.scheduler import ScheduledStep, Scheduler
from weft.engine.wire.messages import AddRequest, BeamOptions, FinishReason, TokenLogprobs, TokensOutput
from weft.engine.wire.params import MAX_BEAMS, MAX_LOGPROBS


def beam_fault(add: AddRequest, vocab_size: int) -> str | None:
    """What is wrong with a request for beams; None when nothing is."""
    beams, most = add.beams or BeamOptions(), min(MAX_BEAMS, vocab_size)
    if add.num_choices > most:
        return f"num_choices must be at most {most} with beams, got {add.num_choices}"
    if beams.width and not add.num_choices <= beams.width <= most:
        return f"the number of beams must be from {add.num_choices}, for as many choices, to {most}, got {beams.width}"
    if not 0 <= beams.num_begun_tokens <= len(add.input.token_ids):
        return f"num_begun_tokens must be from 0 to {len(add.input.token_ids)}, got {beams.num_begun_tokens}"
    if add.sampling_params.max_tokens == 0:
        return "max_tokens must be at least 1 with beams, got 0"
    if add.sampling_params.prompt_logprobs is not None or add.sampling_params.logprob_token_ids:
        return "prompt_logprobs and logprob_token_ids cannot be reported with beams"
    if add.guidance.grammar is not None or add.guidance.reasoning_budget is not None:
        return "beams can follow neither a grammar nor a budget for reasoning"
    return None


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
    """The beams of one prompt, changed only by `advance`. `live` go on, the most probable first, all of one length.

    It decides which continuations go on, which are finished, and when the search ends. The rules are those of
    transformers' `generate(num_beams=...)`. Of all continuations, the most probable first, those that end count as
    finished if they are among the first `width`. Of those that do not end, the first `width` go on. A finished one
    scores its log-probability divided by length ** length_penalty. The length counts output tokens, the one that ended
    it included. Pure arithmetic.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        options: BeamOptions,
        num_logprobs: int = 0,
        forced_end_id: int | None = None,
    ) -> None:
        """Start with one empty beam. width and max_tokens are at least 1. num_logprobs alternatives are kept per id."""
        self._forced_end_id = forced_end_id
        self.live = [Beam()]
        self._width = width
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._options = options
        self._num_logprobs = num_logprobs
        self._finished: list[tuple[float, Beam]] = []  # at most width, best first

    def advance(self, rows: Sequence[TokenLogprobs]) -> None:
        """Extend every live beam by one token.

        `rows` has one entry per live beam: its most probable next ids, the best first. Banned ones are at -inf.
        An entry holds at least 2 * width ids, width and one for each stop id, and num_logprobs, or all of them.
        """
        if self._forced_end_id is not None and self.live[0].num_tokens + 1 == self._max_tokens:
            rows = [TokenLogprobs(0.0, [self._forced_end_id], [0.0])] * len(rows)
        continuations = [
            (beam.logprob + more, source, place)
            for source, (beam, row) in enumerate(zip(self.live, rows, strict=True))
            for place, more in enumerate(row.top_logprobs)
            if more > -math.inf
        ]
        continuations.sort(key=lambda each: -each[0])  # of equals, the first comes first
        live: list[Beam] = []
        for rank, (_, source, place) in enumerate(continuations):
            if rank >= self._width <= len(live):
                break
            longer = self._longer(rows, source, place)
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
        beam, row = self.live[source], rows[source]
        logprob, count = (
            row.top_logprobs[rank],
            sum(more > -math.inf for more in row.top_logprobs[: self._num_logprobs]),
        )
        entry = TokenLogprobs(logprob, row.top_token_ids[:count], row.top_logprobs[:count])
        return Beam(beam, source, row.top_token_ids[rank], entry, beam.logprob + logprob, beam.num_tokens + 1)

    def _score(self, beam: Beam, length: int) -> float:
        return float(beam.logprob / (length + self._options.num_begun_tokens) ** self._options.length_penalty)


class BeamSearch(Continuation):
    """The search of one request. The requests of its beams hold it, so it ends with the last of them."""

    def __init__(self, scheduler: Scheduler, request: Request, num_choices: int, options: BeamOptions) -> None:
        """Make a request that is not scheduled yet the first beam, which is empty."""
        self._scheduler = scheduler
        self._num_choices, width = num_choices, options.width or num_choices
        self._num_logprobs = request.params.logprobs
        self._stop_ids = request.stop_ids
        max_tokens = request.max_num_tokens - request.num_prompt_tokens
        forced = request.params.forced_end_id
        self._last = None if forced is None else max_tokens
        self._beams = Beams(width, max_tokens, self._stop_ids, options, self._num_logprobs or 0, forced)
        self._names = itertools.count(num_choices)  # no choice has these names, so no caller can abort a beam
        self._requests = [request]  # one per live beam
        request.key = request.key._replace(choice=next(self._names))
        request.pending_indices = []
        request.prediction = None
        num_ids = max(2 * width, min(width + len(self._stop_ids), MAX_LOGPROBS), self._num_logprobs or 0)
        request.params = replace(request.params, temperature=0.0, logprobs=num_ids)
        self._rows: dict[Request, TokenLogprobs] = {}

    @override
    def take(self, request: Request, first_row: int, num_rows: int, result: StepResult) -> Outputs:
        if not num_rows:
            return []
        request.num_placeholders -= 1
        self._rows[request] = result.logprobs[first_row]
        if (
            request.status is RequestStatus.WAITING
        ):  # preempted meanwhile; its row is here, so nothing is computed again
            self._scheduler.drop(request)
        if len(self._rows) < len(self._requests):
            return []
        self._beams.advance([self._rows[beam] for beam in self._requests])
        self._rows.clear()
        if self._beams.is_done:
            return self._finish()
        self._form()
        return []

    @override
    def give_way(self, keys: Container[RequestKey]) -> None:
        """If no beam without a row is being computed now, drop as many beams with a row as there are without."""
        others = [request for request in self._requests if request not in self._rows]
        if self._rows and not any(request.num_placeholders or request.key in keys for request in others):
            holders = [request for request in self._rows if not request.is_finished]
            for request in holders[-len(others) :]:
                self._scheduler.drop(request)

    @override
    def end(self, reason: FinishReason, message: str | None) -> Outputs:
        indices = range(self._num_choices)
        return self._close([self._output(index, reason, message=message) for index in indices])

    def _finish(self) -> Outputs:
        best = self._beams.best[: self._num_choices]
        outputs = [self._choice(index, beam) for index, beam in enumerate(best)]
        fault = "no token is left that the parameters of the request allow"
        missing = range(len(best), self._num_choices)
        outputs += [self._output(index, FinishReason.DEAD_END, message=fault) for index in missing]
        self._scheduler.counters.generation_tokens += sum(len(output.token_ids) for output in outputs)
        return self._close(outputs)

    def _close(self, outputs: list[TokensOutput]) -> Outputs:
        connection, request_id, _ = self._requests[0].key
        for request in self._scheduler.requests.choices_of(connection, request_id):
            self._scheduler.finish(request)
        return [(connection, output) for output in outputs]

    def _choice(self, index: int, beam: Beam) -> TokensOutput:
        is_stop = beam.token_id in self._stop_ids and beam.num_tokens != self._last
        output = self._output(index, FinishReason.STOP if is_stop else FinishReason.LENGTH)
        output.token_ids = beam.token_ids
        output.stop_token_id = beam.token_id if is_stop else None
        output.logprobs = beam.entries if self._num_logprobs is not None else None
        output.num_cached_tokens = self._requests[0].num_cached_tokens
        output.queue_time_s = self._requests[0].queue_time_s
        return output

    def _output(self, index: int, reason: FinishReason, message: str | None = None) -> TokensOutput:
        return TokensOutput(self._requests[0].key.request_id, index, [], reason, message=message)

    def _form(self) -> None:
        """Make the list of requests match the live beams."""
        live, parents = self._beams.live, self._requests
        heirs: dict[int, int] = {}  # the first continuation of each parent that has one
        for index, beam in enumerate(live):
            heirs.setdefault(beam.source, index)
        for source, parent in enumerate(parents):
            if source not in heirs and not parent.is_finished:
                self._scheduler.drop(parent)
        self._requests = [
            parents[beam.source] if heirs[beam.source] == index else self._fork(parents[beam.source], beam.token_id)
            for index, beam in enumerate(live)
        ]
        for source, index in heirs.items():
            parent = parents[source]
            _extend(parent, [live[index].token_id])
            if parent.is_finished:  # it gave its place away
                self._scheduler.add(parent)

    def _fork(self, parent: Request, token_id: int) -> Request:
        child = parent.sibling(next(self._names))
        _extend(child, [*parent.token_ids[parent.num_prompt_tokens :], token_id])
        self._scheduler.start_beside(parent, child)
        return child


def _extend(request: Request, token_ids: list[int]) -> None:
    request.token_ids += token_ids
    if request.token_counts is not None:
        for token_id in token_ids:
            request.token_counts.add(token_id)


def give_way(scheduler: Scheduler, step: ScheduledStep | None) -> None:
    """Make room in every search that has no beam in the step just scheduled. O(running requests)."""
    keys: Container[RequestKey] = step.keys if step is not None else ()
    for continuation in dict.fromkeys(request.continuation for request in scheduler.running):
        if continuation is not None:
            continuation.give_way(keys)
