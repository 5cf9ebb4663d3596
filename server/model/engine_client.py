"""The only door from the server to the engine.

Owns the connection to the engine process and one mailbox per request. A mailbox never grows beyond what its choices
may produce: outputs of a choice whose reader is slow are merged. Imports no tensor library and knows no HTTP.
"""

import asyncio
import contextlib
import logging
import pathlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Protocol, Self, cast

import msgspec

from weft.engine.shared.messages import (
    SOCKET_NAME,
    STATUS_NAME,
    AbortRequest,
    Accepted,
    AddRequest,
    EngineInfo,
    FrameReader,
    Rejected,
    RequestOutput,
    StepOutput,
    ToEngine,
    decode_from_engine,
    encode,
)
from weft.engine.shared.status_page import Status, StatusPage
from weft.server.errors import EngineDiedError, EngineLeftError, EngineUnavailableError, rejection

RECONNECT_S = 0.05
"""Pause between two attempts to reach an engine that does not listen yet."""
MEET_S = 10.0
"""How long a process that has not met its first engine waits for it, if the engine says that it is ready."""

logger = logging.getLogger(__name__)


class Generation(Protocol):
    """One accepted request with all its choices. Has one reader."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Iterate over what the choices gain, merged per choice while the reader is away.

        Ends once every choice has finished or was aborted.

        Raises:
            EngineDiedError: The engine went away before every choice had finished.
            EngineLeftError: This server left it before.
        """

    def abort(self, index: int | None = None) -> None:
        """Stop one choice, or all of them; what is unread of it is dropped and no output follows."""

    def close(self) -> None:
        """Abort whatever has not finished. Idempotent; call it in the reader's `finally`."""


class EngineClient(Protocol):
    """The engine as the server sees it."""

    @property
    def info(self) -> EngineInfo | None:
        """What the connected engine said of itself; None while none is connected."""

    def status(self) -> Status:
        """Read the engine's page of shared memory; costs microseconds and never waits."""

    async def meet(self) -> None:
        """Wait for the first handshake if the engine is ready for one; returns at once in any other case.

        Of several server processes one meets the engine first, says that all is ready, and the next request may be
        another's.
        """

    async def generate(self, request: AddRequest) -> Generation:
        """Have one prompt continued; returns once the engine has accepted. Each request is sent once.

        Cancelling the waiting task aborts the request.

        Raises:
            EngineUnavailableError: No engine is connected, it hangs, or it went away before it answered.
            EngineLeftError: This server leaves the engine, or has left it.
            ApiError: The engine did not take the request in; see `rejection`.
        """


class SocketEngineClient:
    """The engine behind the Unix socket of a runtime directory. One per server process, on one event loop.

    Use it as an async context manager: inside, it connects as soon as the engine listens, and again, with a new
    handshake, whenever the engine was replaced.
    """

    def __init__(self, runtime_dir: pathlib.Path) -> None:
        """Open the status page of runtime_dir; connects only inside `async with`."""
        self._socket_path = str(runtime_dir / SOCKET_NAME)
        self._page = StatusPage(runtime_dir / STATUS_NAME)
        self._connection: _Connection | None = None  # None: not connected
        self._connecting: asyncio.Task[None] | None = None  # None: outside `async with`
        self._has_met = asyncio.Event()
        self._has_left = False

    async def __aenter__(self) -> Self:
        """Start to connect; does not wait for the engine."""
        self._connecting = asyncio.create_task(self._keep_connected())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect, and give the status page back."""
        await self.disconnect()
        self._page.close()

    async def disconnect(self) -> None:
        """Leave the engine for good: what still runs fails here, and the engine aborts it. Idempotent."""
        self._has_left = True
        if self._connection is not None:
            self._connection.leave()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
            self._connecting = None

    @property
    def info(self) -> EngineInfo | None:
        """See `EngineClient.info`."""
        return self._connection.info if self._connection else None

    def status(self) -> Status:
        """See `EngineClient.status`."""
        return self._page.read()

    async def meet(self) -> None:
        """See `EngineClient.meet`."""
        if not self._has_met.is_set() and self._page.read().is_ready:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_met.wait(), MEET_S)

    async def generate(self, request: AddRequest) -> Generation:
        """See `EngineClient.generate`."""
        if self._has_left:
            raise EngineLeftError()
        connection = self._connection
        if connection is None or connection.info is None or self._page.read().is_stalled:
            raise EngineUnavailableError()
        mailbox = connection.add(request)
        try:
            await mailbox.accepted
        except asyncio.CancelledError:
            mailbox.close()
            raise
        return mailbox

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                transport, connection = await loop.create_unix_connection(
                    partial(_Connection, on_handshake=self._has_met.set), self._socket_path
                )
            except OSError:  # not there yet, or a socket file that a dead engine left
                await asyncio.sleep(RECONNECT_S)
                continue
            self._connection = connection
            try:
                await connection.lost.wait()
            finally:
                self._connection = None
                transport.abort()


class _Mailbox:
    """What the engine sent for one request and nobody has read. The one implementation of `Generation`.

    Invariant: the connection knows the mailbox exactly as long as `_running` is not empty and nothing went wrong.
    """

    def __init__(self, connection: "_Connection", request: AddRequest) -> None:
        self.accepted: asyncio.Future[None] = connection.loop.create_future()
        self._connection = connection
        self._request_id = request.request_id
        self._running = set(range(request.num_choices))
        self._unread: dict[int, RequestOutput] = {}  # by choice, in the order in which they wait
        self._waiter: asyncio.Future[None] | None = None  # None: no reader waits
        self._error: Exception | None = None

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if not self._running:
                raise StopAsyncIteration
            self._waiter = self._connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._unread.pop(next(iter(self._unread)))

    def abort(self, index: int | None = None) -> None:
        stopped = self._running if index is None else self._running & {index}
        if stopped and self._error is None:
            whole = stopped == self._running
            self._connection.send(AbortRequest(self._request_id, None if whole else index))
            if whole:
                self._connection.forget(self._request_id)
        self._running = self._running - stopped
        if index is None:
            self._unread.clear()
        else:
            self._unread.pop(index, None)
        self._wake()

    def close(self) -> None:
        self.abort()

    def put(self, output: RequestOutput) -> None:
        """Take an output in; merge it when the previous one of its choice is unread."""
        index = output.index
        if index not in self._running:
            return  # it crossed an abort on its way
        unread = self._unread.get(index)
        if unread is None:
            self._unread[index] = output
        else:
            unread.merge(output)
        if output.finish_reason is not None:
            self._running.discard(index)
            if not self._running:
                self._connection.forget(self._request_id)
        self._wake()

    def reject(self, rejected: Rejected) -> None:
        """The engine did not take the request in."""
        self._running.clear()
        if not self.accepted.done():
            self.accepted.set_exception(rejection(rejected.reason, rejected.message))

    def fail(self, before_accepted: Exception, while_running: Exception) -> None:
        """No more comes from the engine."""
        self._error = while_running
        if not self.accepted.done():
            self.accepted.set_exception(before_accepted)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection, which is one engine process: the handshake, then one mailbox for each unfinished request."""

    def __init__(self, on_handshake: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._on_handshake = on_handshake
        self.info: EngineInfo | None = None  # None: no handshake yet
        self.lost = asyncio.Event()
        self._transport: asyncio.WriteTransport | None = None  # None: not yet made, or lost
        self._frames = FrameReader()
        self._mailboxes: dict[int, _Mailbox] = {}

    def add(self, request: AddRequest) -> _Mailbox:
        assert request.request_id not in self._mailboxes, "a request is sent once"
        frame = encode(request)  # first: what cannot be written leaves nothing behind that waits for an answer
        mailbox = _Mailbox(self, request)
        self._mailboxes[request.request_id] = mailbox
        self._write(frame)
        return mailbox

    def forget(self, request_id: int) -> None:
        self._mailboxes.pop(request_id, None)

    def send(self, message: ToEngine) -> None:
        self._write(encode(message))

    def _write(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's does not inherit from it

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._receive(body)
        except (ValueError, msgspec.MsgspecError) as error:
            logger.error("The engine sent what is no message (%s); connecting anew", error)
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.info = None
        self._fail(EngineUnavailableError(), EngineDiedError())
        self.lost.set()

    def leave(self) -> None:
        """Take no more from the engine: whoever still waits for it is told that this server ends."""
        self._fail(EngineLeftError(), EngineLeftError())

    def _fail(self, before_accepted: Exception, while_running: Exception) -> None:
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.fail(before_accepted, while_running)

    def _receive(self, body: bytes) -> None:
        message = decode_from_engine(body)
        if isinstance(message, StepOutput):  # first, because nearly all are
            mailboxes = self._mailboxes
            for output in message.outputs:
                if (mailbox := mailboxes.get(output.request_id)) is not None:
                    mailbox.put(output)
        elif isinstance(message, Accepted):
            mailbox = self._mailboxes.get(message.request_id)
            if mailbox is not None and not mailbox.accepted.done():
                mailbox.accepted.set_result(None)
        elif isinstance(message, Rejected):
            mailbox = self._mailboxes.pop(message.request_id, None)
            if mailbox is not None:
                mailbox.reject(message)
        else:
            self.info = message
            self._on_handshake()
