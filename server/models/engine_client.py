"""The server's only connection to the engine: sends requests and receives their outputs.

Owns the connection to the engine process and one mailbox per request. If a reader is slow, the outputs of a choice are
merged. So a mailbox never holds more than its choices may produce. Imports no tensor library and knows no HTTP.
"""

import asyncio
import contextlib
import logging
import pathlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Protocol, Self, cast

import msgspec

from weft.engine.wire import messages as wire
from weft.engine.wire.status_page import Status, StatusPage
from weft.server.errors import EngineDiedError, EngineLeftError, EngineUnavailableError, rejection

RECONNECT_S = 0.05
"""Pause between two attempts to connect to an engine that does not listen yet."""
MEET_S = 10.0
"""Longest wait for the first handshake, if the status page says that the engine is ready."""

logger = logging.getLogger(__name__)


class Generation(Protocol):
    """One accepted request with all its choices. It has one reader."""

    def __aiter__(self) -> AsyncIterator[wire.RequestOutput]:
        """Iterate over the outputs of the choices. While the reader is busy, outputs of a choice are merged.

        Ends once every choice has finished or was aborted.

        Raises:
            EngineDiedError: The engine disconnected before every choice had finished.
            EngineLeftError: This server disconnected before every choice had finished.
        """

    def abort(self, index: int | None = None) -> None:
        """Stop one choice, or all if index is None. Unread output is dropped, and no more follows."""

    def close(self) -> None:
        """Abort the choices that have not finished. Idempotent. Call it in the reader's `finally`."""


class EngineClient(Protocol):
    """The engine as the server sees it."""

    @property
    def info(self) -> wire.EngineInfo | None:
        """What the engine reported in its handshake; None while no engine is connected."""

    def status(self) -> Status:
        """Read the engine's status page in shared memory. Takes microseconds and never waits."""

    async def meet(self) -> None:
        """Wait for the first handshake if the engine is ready for it. Returns at once in all other cases.

        Several server processes connect to the engine. The first one reports that all is ready. The next request may
        still reach a process that has not connected yet.
        """

    async def load(self) -> None:
        """Have the model loaded, if that is done on demand, and wait for the handshake; else `meet`.

        Raises:
            ModelLoadingError: It is not loaded in time.
            ModelFailedError: It cannot be loaded.
        """

    async def generate(self, request: wire.AddRequest) -> Generation:
        """Send a request, and return once the engine has accepted it. Each request is sent once.

        If the waiting task is cancelled, the request is aborted.

        Raises:
            EngineUnavailableError: No engine is connected, it hangs, or it disconnected before it replied.
            EngineLeftError: This server is disconnecting from the engine, or has disconnected.
            ApiError: The engine rejected the request; see `rejection`.
        """


class SocketEngineClient:
    """Client of the engine that listens on the Unix socket of a runtime directory.

    A server process has one, on one event loop. Use it as an async context manager. Inside, it connects as soon as the
    engine listens. Whenever the engine is replaced, it connects again, with a new handshake.

    Attributes:
        has_left: Whether it has disconnected for good.
        on_lost: Called whenever the connection to an engine has ended.
    """

    def __init__(self, runtime_dir: pathlib.Path, *, on_demand: bool = False) -> None:
        """Open the status page in runtime_dir. Connects only inside `async with`, and on demand after `connect`."""
        self._socket_path = str(runtime_dir / wire.SOCKET_NAME)
        self._page = StatusPage(runtime_dir / wire.STATUS_NAME)
        self._connection: _Connection | None = None  # None: not connected
        self._connecting: asyncio.Task[None] | None = None  # None: before `async with`
        self._has_met = asyncio.Event()
        self._on_demand = on_demand
        self._may_connect = asyncio.Event()
        self._may_connect.set()
        self.has_left = False
        self.on_lost: Callable[[], None] = lambda: None

    async def __aenter__(self) -> Self:
        """Start to connect. Does not wait for the engine."""
        self._connecting = asyncio.create_task(self._keep_connected())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect, and close the status page."""
        await self.disconnect()
        self._page.close()

    async def disconnect(self) -> None:
        """Disconnect from the engine for good. Running requests fail here, and the engine aborts them. Idempotent."""
        self.has_left = True
        if self._connection is not None:
            self._connection.leave()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])

    def connect(self) -> None:
        """Try to connect, once, if it is not connected and does so on demand."""
        self._may_connect.set()

    @property
    def info(self) -> wire.EngineInfo | None:
        """See `EngineClient.info`."""
        return self._connection.info if self._connection else None

    def status(self) -> Status:
        """See `EngineClient.status`."""
        return self._page.read()

    async def meet(self) -> None:
        """See `EngineClient.meet`."""
        if not self._has_met.is_set() and self._page.read().is_ready:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MEET_S):
                    await self._has_met.wait()

    load = meet

    async def generate(self, request: wire.AddRequest) -> Generation:
        """See `EngineClient.generate`."""
        if self.has_left:
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
            if self._on_demand:
                self._may_connect.clear()
            await self._may_connect.wait()
            try:
                connect = partial(_Connection, on_handshake=self._has_met.set)
                transport, connection = await loop.create_unix_connection(connect, self._socket_path)
            except OSError:  # no engine yet, or a dead engine's socket file
                await asyncio.sleep(RECONNECT_S)
                continue
            self._connection = connection
            try:
                await connection.lost.wait()
            finally:
                self._connection = None
                transport.abort()
                self.on_lost()


class _Mailbox:
    """Holds the unread outputs of one request. The only implementation of `Generation`.

    Invariant: the connection keeps the mailbox exactly as long as `_running` is not empty and nothing has failed.
    """

    def __init__(self, connection: "_Connection", request: wire.AddRequest) -> None:
        self.accepted: asyncio.Future[None] = connection.loop.create_future()
        self._connection = connection
        self._request_id = request.request_id
        self._running = set(range(request.num_choices))
        self._unread: dict[int, wire.RequestOutput] = {}  # by choice, oldest first
        self._waiter: asyncio.Future[None] | None = None  # None: no reader is waiting
        self._error: Exception | None = None

    def __aiter__(self) -> AsyncIterator[wire.RequestOutput]:
        return self

    async def __anext__(self) -> wire.RequestOutput:
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
            self._connection.send(wire.AbortRequest(self._request_id, None if whole else index))
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

    def put(self, output: wire.RequestOutput) -> None:
        """Store an output. If the choice has an unread one, merge the two."""
        index = output.index
        if index not in self._running:
            return  # sent before the engine saw the abort
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

    def reject(self, rejected: wire.Rejected) -> None:
        """Record that the engine rejected the request."""
        self._running.clear()
        if not self.accepted.done():
            self.accepted.set_exception(rejection(rejected.reason, rejected.message))

    def fail(self, before_accepted: Exception, while_running: Exception) -> None:
        """Record that no more output will come from the engine."""
        self._error = while_running
        if not self.accepted.done():
            self.accepted.set_exception(before_accepted)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection to one engine process: the handshake, then one mailbox per unfinished request."""

    def __init__(self, on_handshake: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._on_handshake = on_handshake
        self.info: wire.EngineInfo | None = None  # None: no handshake yet
        self.lost = asyncio.Event()
        self._transport: asyncio.WriteTransport | None = None  # None: not yet made, or lost
        self._frames = wire.FrameReader()
        self._mailboxes: dict[int, _Mailbox] = {}

    def add(self, request: wire.AddRequest) -> _Mailbox:
        assert request.request_id not in self._mailboxes, "a request is sent once"
        frame = wire.encode(request)  # first: if encoding fails, no mailbox is left behind
        mailbox = _Mailbox(self, request)
        self._mailboxes[request.request_id] = mailbox
        self._write(frame)
        return mailbox

    def forget(self, request_id: int) -> None:
        self._mailboxes.pop(request_id, None)

    def send(self, message: wire.ToEngine) -> None:
        self._write(wire.encode(message))

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
        """Take no more outputs. All waiting readers get the error that this server is shutting down."""
        self._fail(EngineLeftError(), EngineLeftError())

    def _fail(self, before_accepted: Exception, while_running: Exception) -> None:
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.fail(before_accepted, while_running)

    def _receive(self, body: bytes) -> None:
        message = wire.decode_from_engine(body)
        if isinstance(message, wire.StepOutput):  # first: nearly all messages are
            mailboxes = self._mailboxes
            for output in message.outputs:
                if (mailbox := mailboxes.get(output.request_id)) is not None:
                    mailbox.put(output)
        elif isinstance(message, wire.Accepted):
            if (mailbox := self._mailboxes.get(message.request_id)) is not None and not mailbox.accepted.done():
                mailbox.accepted.set_result(None)
        elif isinstance(message, wire.Rejected):
            if (mailbox := self._mailboxes.pop(message.request_id, None)) is not None:
                mailbox.reject(message)
        else:
            self.info = message
            self._on_handshake()
