"""Grammars in the step loop: holds requests that wait until theirs is compiled, and computes the masks of each step.

Nothing here blocks the loop: compilations and masks run in threads.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from weft.engine.batch import RowMasks
from weft.engine.guidance.compiler import GrammarCompiler, InvalidGrammarError
from weft.engine.guidance.matcher import GrammarMatcher
from weft.engine.request import Request
from weft.engine.schedule.scheduler import ScheduledRequest, ScheduledStep
from weft.engine.wire.messages import RejectReason

logger = logging.getLogger(__name__)

COMPILE_LIMIT_S = 10.0
"""Time limit of a compilation. The request is then refused. The thread goes on, so a later request finds the result."""

QUEUE_LIMIT_S = 60.0
"""Time limit for a compilation to begin. The request is then refused and may be tried again."""

_NUM_AT_WORK = 6
"""Compilations that a crash may be blamed on: the four that run, and two that may begin before the next record."""

_Key = tuple[int, int]


@dataclass(slots=True)
class _Waiting:
    request: Request
    matcher: Future[GrammarMatcher]
    submit_time: float
    aborted_choices: list[int] = field(default_factory=list)

    @property
    def key(self) -> _Key:
        return self.request.key[:2]


@dataclass(frozen=True, slots=True)
class Ready:
    """A request whose wait is over.

    Attributes:
        request: Has what it waited for, unless there is a fault.
        fault: Why the request is refused; None if it is not.
        reason: The kind of fault.
        aborted_choices: Choices that the caller aborted meanwhile.
    """

    request: Request
    fault: str | None
    reason: RejectReason
    aborted_choices: list[int]


class PendingGrammars:
    """Owner of the requests whose grammar is being compiled, outside the scheduler's queues.

    The step loop polls. Compilations begin in the order of submission, so only the first ones can have begun. A poll
    looks only at those and at finished ones, however many wait.
    """

    def __init__(self, compiler: GrammarCompiler, limit_s: float = COMPILE_LIMIT_S) -> None:
        self._compiler = compiler
        self._limit_s = limit_s
        self._waiting: dict[_Key, _Waiting] = {}  # in order of arrival
        self._compilations: dict[Future[GrammarMatcher], dict[_Key, _Waiting]] = {}  # in order of submission
        self._start_times: dict[Future[GrammarMatcher], float] = {}  # of compilations that have begun
        self._done: deque[Future[GrammarMatcher]] = deque()  # filled by the compiling threads

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> list[Request]:
        """Requests whose grammar is being compiled or is among the next. O(these requests), not O(all that wait)."""
        at_work = dict.fromkeys([*self._start_times, *islice(self._compilations, _NUM_AT_WORK)])
        return [waiting.request for matcher in at_work for waiting in self._compilations[matcher].values()]

    def has(self, connection: int, request_id: int) -> bool:
        """Whether a request waits here."""
        return (connection, request_id) in self._waiting

    def prepare(self) -> None:
        """Load the vocabulary while the engine is idle. Otherwise the first grammar waits a second for it."""
        with contextlib.suppress(InvalidGrammarError):
            self._compiler.prepare()

    def submit(self, request: Request, text: str) -> None:
        """Start to compile the grammar of a request. The request waits here meanwhile.

        Raises:
            InvalidGrammarError: The text is too long.
        """
        waiting = _Waiting(request, self._compiler.compile(text), time.monotonic())
        matcher = waiting.matcher
        if matcher not in self._compilations:
            self._compilations[matcher] = {}
            if matcher.running():  # begun earlier, for a request that has left
                self._start_times[matcher] = waiting.submit_time
            matcher.add_done_callback(self._done.append)
        self._waiting[waiting.key] = self._compilations[matcher][waiting.key] = waiting

    def abort(self, connection: int, request_id: int, index: int | None = None) -> None:
        """Forget a request, or note that one of its choices was aborted."""
        waiting = self._waiting.get((connection, request_id))
        if waiting is not None and index is not None:
            waiting.aborted_choices.append(index)
        elif waiting is not None:
            self._drop([waiting])

    def abort_connection(self, connection: int) -> None:
        """Forget the requests of a server whose connection is closed."""
        self._drop([waiting for key, waiting in self._waiting.items() if key[0] == connection])

    def take_ready(self) -> list[Ready]:
        """Remove and return the requests whose wait is over, in order of arrival."""
        now = time.monotonic()
        self._note_starts(now)
        over = {waiting.key: waiting for waiting in self._late(now)}
        while self._done:
            over |= self._compilations.get(self._done.popleft(), {})
        in_order = sorted(over.values(), key=lambda waiting: waiting.request.arrival)
        ready = [self._end(waiting) for waiting in in_order]
        self._drop(in_order)
        return ready

    def _note_starts(self, now: float) -> None:
        for matcher in self._compilations:
            if matcher not in self._start_times and not matcher.done():
                if not matcher.running():
                    break
                self._start_times[matcher] = now

    def _late(self, now: float) -> list[_Waiting]:
        """Requests whose compilation takes too long, or has not begun in time."""
        slow = [matcher for matcher, start_time in self._start_times.items() if now > start_time + self._limit_s]
        late = [waiting for matcher in slow for waiting in self._compilations[matcher].values()]
        for waiting in self._waiting.values():
            if now <= waiting.submit_time + QUEUE_LIMIT_S:
                break
            if waiting.matcher not in self._start_times:
                late.append(waiting)
        return late

    def _drop(self, leaving: Sequence[_Waiting]) -> None:
        """Forget some requests. A compilation that nobody waits for is cancelled unless it has begun."""
        for waiting in leaving:
            del self._waiting[waiting.key]
            others = self._compilations[waiting.matcher]
            del others[waiting.key]
            if not others:
                del self._compilations[waiting.matcher]
                self._start_times.pop(waiting.matcher, None)
                waiting.matcher.cancel()

    def _end(self, waiting: _Waiting) -> Ready:
        fault, reason = None, RejectReason.GRAMMAR
        if not waiting.matcher.done() and not waiting.matcher.running():
            fault, reason = "too many grammars wait to be compiled; try again", RejectReason.QUEUE_FULL
        elif not waiting.matcher.done():
            fault = f"the grammar could not be compiled within {self._limit_s:g} s"
        elif (error := waiting.matcher.exception()) is None:
            waiting.request.grammar = waiting.matcher.result().copy()
        elif isinstance(error, InvalidGrammarError):
            fault = str(error)
        else:
            logger.error("a grammar could not be compiled", exc_info=error)
            fault = f"the grammar could not be compiled: {type(error).__name__}"
        return Ready(waiting.request, fault, reason, waiting.aborted_choices)


class MaskComputer:
    """Computes the grammar masks of a step in a thread, while the device computes the forward pass.

    Owner of the thread. It uses a matcher only between `begin` and the end of the future.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._pool = ThreadPoolExecutor(1, "masks")

    def begin(self, step: ScheduledStep) -> "Future[RowMasks] | None":
        """Start to compute the masks of a step that is about to be launched; None if no row has a grammar."""
        guided = [s for s in step.requests if s.request.grammar is not None and s.num_rows]
        return self._pool.submit(self._compute, guided) if guided else None

    def _compute(self, guided: list[ScheduledRequest]) -> RowMasks:
        rows = np.concatenate([np.arange(s.first_row, s.first_row + s.num_rows) for s in guided])
        bits = np.full((len(rows), -(-self._vocab_size // 32)), -1, np.int32)
        first = 0
        for scheduled in guided:
            assert scheduled.request.grammar is not None
            scheduled.request.grammar.fill_masks(scheduled.draft_token_ids, bits[first : first + scheduled.num_rows])
            first += scheduled.num_rows
        return RowMasks(rows, bits)
