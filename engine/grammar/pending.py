"""Requests that wait for their grammar, outside the scheduler's queues. The step loop asks; nothing here waits."""

import contextlib
import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.errors import GrammarError
from engine.grammar.matcher import GrammarMatcher
from engine.protocol import RejectReason
from engine.request import Request

logger = logging.getLogger(__name__)

COMPILE_LIMIT_S = 10.0
"""What compiles for longer is refused; the thread goes on, and a later request finds what it made."""

QUEUE_LIMIT_S = 60.0
"""Who has waited longer behind the grammars of others is sent away, to come again."""


@dataclass(slots=True)
class _Waiting:
    request: Request
    matcher: Future[GrammarMatcher]
    submit_time: float
    start_time: float | None = None  # None: others are being compiled
    aborted_choices: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The end of the wait.

    Attributes:
        request: Has its grammar, unless there is a fault.
        fault: Why the request is not taken in; None if it is.
        aborted_choices: Choices that the caller gave up meanwhile.
    """

    request: Request
    fault: str | None
    reason: RejectReason
    aborted_choices: list[int]


class PendingGrammars:
    """Owner of the requests whose grammar is being compiled."""

    def __init__(self, compiler: GrammarCompiler, limit_s: float = COMPILE_LIMIT_S) -> None:
        self._compiler = compiler
        self._limit_s = limit_s
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> list[Request]:
        """Those that wait, in order of arrival."""
        return [waiting.request for waiting in self._waiting]

    def has(self, connection: int, request_id: int) -> bool:
        """Whether a request waits here."""
        return any(w.request.key[:2] == (connection, request_id) for w in self._waiting)

    def prepare(self) -> None:
        """Do now, while nobody waits, what the first grammar would take a second for; without a vocabulary nothing."""
        with contextlib.suppress(GrammarError):
            self._compiler.prepare()

    def submit(self, request: Request, text: str) -> None:
        """Let a request wait for its grammar.

        Raises:
            GrammarError: The text is too long.
        """
        matcher = self._compiler.compile(text)
        self._waiting.append(_Waiting(request, matcher, time.monotonic()))

    def abort(self, connection: int, request_id: int, index: int | None = None) -> None:
        """Forget a request, or note that one of its choices is not wanted any more."""
        key = (connection, request_id)
        if index is None:
            self._keep([w for w in self._waiting if w.request.key[:2] != key])
        for waiting in self._waiting:
            if index is not None and waiting.request.key[:2] == key:
                waiting.aborted_choices.append(index)

    def abort_connection(self, connection: int) -> None:
        """Forget the requests of a server that has gone."""
        self._keep([w for w in self._waiting if w.request.key.connection != connection])

    def take_ready(self) -> list[Compiled]:
        """Give out those whose wait is over, in order of arrival."""
        is_over = [self._is_over(waiting, time.monotonic()) for waiting in self._waiting]
        ready = [self._end(w) for w, over in zip(self._waiting, is_over, strict=True) if over]
        self._keep([w for w, over in zip(self._waiting, is_over, strict=True) if not over])
        return ready

    def _is_over(self, waiting: _Waiting, now: float) -> bool:
        if waiting.start_time is None and waiting.matcher.running():
            waiting.start_time = now
        if waiting.start_time is None:
            return waiting.matcher.done() or now > waiting.submit_time + QUEUE_LIMIT_S
        return waiting.matcher.done() or now > waiting.start_time + self._limit_s

    def _keep(self, waiting: list[_Waiting]) -> None:
        """Go on with these; what nobody waits for any more need not begin to be compiled."""
        wanted = {id(w.matcher) for w in waiting}
        for gone in self._waiting:
            if id(gone.matcher) not in wanted:
                gone.matcher.cancel()
        self._waiting = waiting

    def _end(self, waiting: _Waiting) -> Compiled:
        fault, reason = None, RejectReason.GRAMMAR
        if not waiting.matcher.done() and waiting.start_time is None:
            fault, reason = "too many grammars wait to be compiled; try again", RejectReason.QUEUE_FULL
        elif not waiting.matcher.done():
            fault = f"the grammar could not be compiled within {self._limit_s:g} s"
        elif (error := waiting.matcher.exception()) is None:
            waiting.request.grammar = waiting.matcher.result().copy()
        elif isinstance(error, GrammarError):
            fault = str(error)
        else:
            logger.error("a grammar could not be compiled", exc_info=error)
            fault = f"the grammar could not be compiled: {type(error).__name__}"
        return Compiled(waiting.request, fault, reason, waiting.aborted_choices)
