"""The only door from the server to the engine.

Owns the connection to the engine process and one mailbox per request. A mailbox never grows beyond what its choices
may produce: outputs of a choice whose reader is slow are merged. Imports no tensor library and knows no HTTP.

    EngineUnavailableError   no engine now: it loads, or is being restarted
    EngineDiedError          the engine went away while the request ran
    RequestRejectedError     the engine did not take the request in
"""

from collections.abc import AsyncIterator
from typing import Protocol

from engine.protocol import EngineInfo, RejectReason, RequestOutput
from engine.sampling_params import SamplingParams
from engine.status_page import Status


class EngineUnavailableError(Exception):
    """No engine is connected, or it went away before it answered; the same request may succeed in a moment."""


class EngineDiedError(Exception):
    """The connection broke while the request ran; what was generated so far has been handed out before."""


class RequestRejectedError(Exception):
    """The engine did not take the request in; `message` is fit for the caller."""

    def __init__(self, reason: RejectReason, message: str) -> None:
        """Keep the reason and the message of the engine's answer."""
        super().__init__(message)
        self.reason = reason
        self.message = message


class Generation(Protocol):
    """One accepted request with all its choices. Has one reader."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Iterate over what the choices gain, merged per choice while the reader is away.

        Ends once every choice has finished or was aborted.

        Raises:
            EngineDiedError: The engine went away before every choice had finished.
        """
        ...

    def abort(self, index: int | None = None) -> None:
        """Stop one choice, or all of them; no output follows for it. Finished ones are left alone."""
        ...

    def close(self) -> None:
        """Abort whatever has not finished. Idempotent; to be called in the reader's `finally`."""
        ...


class EngineClient(Protocol):
    """The engine as the server sees it."""

    @property
    def info(self) -> EngineInfo | None:
        """What the connected engine said of itself; None while none is connected."""
        ...

    def status(self) -> Status:
        """Read the engine's page of shared memory; costs microseconds and never waits."""
        ...

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        num_choices: int = 1,
        tenant: str = "",
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str = "",
    ) -> Generation:
        """Have one prompt continued; returns once the engine has accepted. Fields as in `AddRequest`.

        Cancelling the waiting task aborts the request.

        Raises:
            EngineUnavailableError: No engine is connected, or it went away before it answered.
            RequestRejectedError: The engine did not take the request in.
        """
        ...
