"""Holds requests that cannot be scheduled yet: they wait for a grammar, and then for an adapter."""

from collections.abc import Sequence

from weft.engine.core.adapters import AdapterTable
from weft.engine.core.check_request import RejectedError
from weft.engine.core.pending_grammars import PendingGrammars, Ready
from weft.engine.guidance.compiler import InvalidGrammarError
from weft.engine.request import Request
from weft.engine.schedule.scheduler import ScheduledStep
from weft.engine.shared.messages import RejectReason


class Pending:
    """Both kinds of waiting, one after the other.

    Attributes:
        grammars: Compiles grammars; None rejects requests with one.
        adapters: The slots of adapters.
    """

    def __init__(self, grammars: PendingGrammars | None, adapters: AdapterTable) -> None:
        self.grammars = grammars
        self.adapters = adapters

    def __len__(self) -> int:
        return len(self.grammars or ()) + len(self.adapters)

    @property
    def suspects(self) -> list[Request]:
        """Requests whose wait a crash may be blamed on."""
        return self.grammars.requests if self.grammars is not None else []

    def has(self, connection: int, request_id: int) -> bool:
        """Whether a request waits here."""
        in_grammars = self.grammars is not None and self.grammars.has(connection, request_id)
        return in_grammars or self.adapters.has(connection, request_id)

    def take(self, request: Request, grammar: str | None) -> bool:
        """Let a request wait here if it must; whether it does.

        Raises:
            RejectedError: Its grammar cannot be followed.
        """
        if grammar is None:
            return request.adapter is not None and not self.adapters.admit(request)
        try:
            if self.grammars is None:
                raise InvalidGrammarError("this engine follows no grammars")
            self.grammars.submit(request, grammar)
        except InvalidGrammarError as error:
            raise RejectedError(RejectReason.GRAMMAR, str(error)) from error
        return True

    def take_ready(self, launched: Sequence[ScheduledStep]) -> list[Ready]:
        """Remove and return the requests whose wait is over. `launched`: the steps on the device."""
        compiled = self.grammars.take_ready() if self.grammars else []
        ready = [
            each
            for each in compiled
            if each.fault is not None
            or each.request.adapter is None
            or self.adapters.admit(each.request, each.aborted_choices)
        ]
        return ready + self.adapters.take_ready(launched, ready)

    def abort(self, connection: int, request_id: int, index: int | None = None) -> None:
        """Forget a request, or note that one of its choices was aborted."""
        self.adapters.abort(connection, request_id, index)
        if self.grammars is not None:
            self.grammars.abort(connection, request_id, index)

    def abort_connection(self, connection: int) -> None:
        """Forget the requests of a server whose connection is closed."""
        self.adapters.abort_connection(connection)
        if self.grammars is not None:
            self.grammars.abort_connection(connection)
