"""The engine's end of the sockets to the server processes.

Sockets are read between steps. Writes never wait: outputs that a slow reader has not taken are merged per choice, so an
outbox is bounded by the tokens of that connection's requests. End of file means that the server is dead. Knows messages
and bytes, nothing of scheduling.
"""

import logging
import pathlib
import selectors
import socket
from collections.abc import Iterator

import msgspec

from weft.engine.wire import messages as wire

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20


class ServerConnection:
    """One server process. Owned by `ServerLink`."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.number = number
        self.sock = sock
        self.reader = wire.FrameReader()
        self._unsent = bytearray()
        self._outputs: dict[tuple[int, int], wire.RequestOutput] = {}

    @property
    def has_unsent(self) -> bool:
        """Whether anything waits to be sent."""
        return bool(self._unsent or self._outputs)

    def put(self, message: wire.FromEngine) -> None:
        """Queue a small message."""
        self._flush_outputs()
        self._unsent += wire.encode(message)

    def put_output(self, output: wire.RequestOutput) -> None:
        """Queue an output; merge it with the one still queued for the same choice."""
        queued = self._outputs.setdefault((output.request_id, output.index), output)
        if queued is not output:
            queued.merge(output)

    def send(self) -> None:
        """Send as much as the socket takes now.

        Raises:
            OSError: The peer is gone.
        """
        while self.has_unsent:
            if not self._unsent:
                self._flush_outputs()
            try:
                sent = self.sock.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def _flush_outputs(self) -> None:
        if self._outputs:
            self._unsent += wire.encode(wire.StepOutput(list(self._outputs.values())))
            self._outputs = {}


class ServerLink:
    """Owner of the listening socket and of all connections."""

    def __init__(self, path: pathlib.Path, info: wire.EngineInfo) -> None:
        """Listen at path, in place of the socket of an earlier engine; send info to every server that connects."""
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._info = info
        self._connections: dict[int, ServerConnection] = {}
        self._num_accepted = 0

    @property
    def has_unsent(self) -> bool:
        """Whether anything waits for a server to read it."""
        return any(connection.has_unsent for connection in self._connections.values())

    def poll(self, timeout: float | None) -> Iterator[tuple[int, wire.ToEngine | None]]:
        """Wait up to timeout seconds (None: for ever) for traffic, and yield (connection, message).

        None in place of a message means that the connection has ended.
        """
        for key, events in self._selector.select(timeout):
            connection: ServerConnection | None = key.data
            if connection is None:
                self._accept()
                continue
            try:
                if events & selectors.EVENT_WRITE:
                    connection.send()
                    self._watch(connection)
                if events & selectors.EVENT_READ:
                    yield from ((connection.number, message) for message in self._read(connection))
            except EOFError:  # of a server process, whose end is the supervisor's to tell
                self._close(connection)
                yield connection.number, None
            except (OSError, ValueError, msgspec.DecodeError) as error:
                logger.info("server connection %d ended: %s", connection.number, error or type(error).__name__)
                self._close(connection)
                yield connection.number, None

    def put(self, number: int, message: wire.FromEngine) -> None:
        """Send or queue a small message; a connection that has ended is ignored."""
        connection = self._connections.get(number)
        if connection is not None:
            connection.put(message)
            self._send(connection)

    def put_outputs(self, outputs: list[tuple[int, wire.RequestOutput]]) -> None:
        """Send a step's outputs: one message for each connection."""
        touched = set()
        for number, output in outputs:
            connection = self._connections.get(number)
            if connection is not None:
                connection.put_output(output)
                touched.add(connection)
        for connection in touched:
            self._send(connection)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        connection = ServerConnection(self._num_accepted, sock)
        self._num_accepted += 1
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self.put(connection.number, self._info)

    def _read(self, connection: ServerConnection) -> list[wire.ToEngine]:
        data = connection.sock.recv(_READ_BYTES)
        if not data:
            raise EOFError
        return [wire.decode_to_engine(body) for body in connection.reader.feed(data)]

    def _send(self, connection: ServerConnection) -> None:
        try:
            connection.send()
        except OSError:
            return  # reading sees the end as well, and reports it
        self._watch(connection)

    def _watch(self, connection: ServerConnection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
        self._selector.modify(connection.sock, events, connection)

    def _close(self, connection: ServerConnection) -> None:
        self._selector.unregister(connection.sock)
        connection.sock.close()
        del self._connections[connection.number]
