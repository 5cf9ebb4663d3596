import pathlib
import socket
from collections.abc import Callable, Iterator

import pytest

from weft.engine.loop.server_link import ServerLink
from weft.engine.wire.messages import (
    AbortRequest,
    Accepted,
    EngineInfo,
    FinishReason,
    FrameReader,
    FromEngine,
    StepOutput,
    ToEngine,
    TokensOutput,
    decode_from_engine,
    encode,
)

INFO = EngineInfo("epoch", "Qwen3ForCausalLM", 100, 4096, (1,), "cpu", "float32", "sdpa", 16, 9, 8, 2048)


class Server:
    """The other end: reads only when told to."""

    def __init__(self, path: pathlib.Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(path))
        self.sock.settimeout(60.0)
        self._reader = FrameReader()
        self._messages: list[FromEngine] = []

    def read(self) -> FromEngine:
        while not self._messages:
            data = self.sock.recv(1 << 16)
            assert data, "the engine closed the connection"
            self._messages += map(decode_from_engine, self._reader.feed(data))
        return self._messages.pop(0)


@pytest.fixture
def link(tmp_path: pathlib.Path) -> Iterator[ServerLink]:
    link = ServerLink(tmp_path / "engine.sock", INFO)
    yield link
    for connection in list(link._connections.values()):
        link._close(connection)
    link._selector.close()
    link._listener.close()


@pytest.fixture
def connect(link: ServerLink, tmp_path: pathlib.Path) -> Iterator[Callable[[], Server]]:
    """Connects one more server, which has read the handshake."""
    servers = []

    def connect() -> Server:
        servers.append(Server(tmp_path / "engine.sock"))
        assert poll(link) == []
        assert servers[-1].read() == INFO
        return servers[-1]

    yield connect
    for server in servers:
        server.sock.close()


def poll(link: ServerLink) -> list[tuple[int, ToEngine | None]]:
    return list(link.poll(60.0))


def test_messages_come_with_the_number_of_their_connection(link: ServerLink, connect: Callable[[], Server]) -> None:
    first, second = connect(), connect()
    second.sock.sendall(encode(AbortRequest(1)) + encode(AbortRequest(2)))
    assert poll(link) == [(1, AbortRequest(1)), (1, AbortRequest(2))]
    first.sock.sendall(encode(AbortRequest(3)))
    assert poll(link) == [(0, AbortRequest(3))]
    assert list(link.poll(0.0)) == []


def test_a_frame_may_arrive_in_pieces(link: ServerLink, connect: Callable[[], Server]) -> None:
    server = connect()
    frame = encode(AbortRequest(1))
    server.sock.sendall(frame[:5])
    assert poll(link) == []
    server.sock.sendall(frame[5:])
    assert poll(link) == [(0, AbortRequest(1))]


def test_a_step_is_one_message_to_each_connection(link: ServerLink, connect: Callable[[], Server]) -> None:
    first, second = connect(), connect()
    a, b, c = TokensOutput(1, 0, [5]), TokensOutput(1, 0, [6]), TokensOutput(2, 0, [7])
    link.put_outputs([(0, a), (1, b), (0, c), (9, a)])
    assert first.read() == StepOutput([a, c])
    assert second.read() == StepOutput([b])


def test_outputs_go_before_what_is_queued_later(link: ServerLink, connect: Callable[[], Server]) -> None:
    server = connect()
    link.put_outputs([(0, TokensOutput(1, 0, [5]))])
    link.put(0, Accepted(2))
    assert server.read() == StepOutput([TokensOutput(1, 0, [5])])
    assert server.read() == Accepted(2)


def test_outputs_merge_while_the_reader_is_slow_and_nothing_is_lost(
    link: ServerLink, connect: Callable[[], Server]
) -> None:
    """It never waits for the reader, who would keep it waiting for ever."""
    server = connect()
    connection = link._connections[0]
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)  # far less than all the steps take
    num_steps, num_requests = 4000, 16
    for step in range(num_steps):
        reason = FinishReason.LENGTH if step == num_steps - 1 else None
        link.put_outputs([(0, TokensOutput(r, 0, [step], reason)) for r in range(num_requests)])
    assert len(connection._outputs) == num_requests  # merged: no more than one entry for each choice
    assert len(connection._unsent) < 4096  # a step's frame at most
    received: dict[int, list[int]] = {r: [] for r in range(num_requests)}
    finished: set[int] = set()
    num_messages = 0
    while len(finished) < num_requests:
        link_has_unsent = connection.has_unsent
        message = server.read()
        assert isinstance(message, StepOutput)
        num_messages += 1
        for output in message.outputs:
            received[output.request_id] += output.token_ids
            if output.finish_reason is FinishReason.LENGTH:
                finished.add(output.request_id)
        if link_has_unsent:
            assert list(link.poll(0.0)) == []
    assert all(ids == list(range(num_steps)) for ids in received.values())
    assert num_messages < num_steps
    assert not connection.has_unsent


def test_a_dead_server_is_reported_once(link: ServerLink, connect: Callable[[], Server]) -> None:
    first, second = connect(), connect()
    first.sock.close()
    link.put_outputs([(0, TokensOutput(1, 0, [5]))] * 2)
    link.put(0, Accepted(1))
    assert poll(link) == [(0, None)]
    assert list(link.poll(0.0)) == []
    link.put_outputs([(0, TokensOutput(1, 0, [5])), (1, TokensOutput(1, 0, [6]))])
    link.put(0, Accepted(1))
    assert second.read() == StepOutput([TokensOutput(1, 0, [6])])


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", encode(Accepted(1))])
def test_a_peer_that_lost_step_is_dropped(link: ServerLink, connect: Callable[[], Server], data: bytes) -> None:
    server, other = connect(), connect()
    server.sock.sendall(data)
    assert poll(link) == [(0, None)]
    assert server.sock.recv(1) == b""
    other.sock.sendall(encode(AbortRequest(1)))
    assert poll(link) == [(1, AbortRequest(1))]


def test_a_new_engine_takes_the_socket_over(tmp_path: pathlib.Path, link: ServerLink) -> None:
    successor = ServerLink(tmp_path / "engine.sock", INFO)
    server = Server(tmp_path / "engine.sock")
    assert list(link.poll(0.0)) == []
    assert list(successor.poll(60.0)) == []
    assert server.read() == INFO
    server.sock.close()
    assert list(successor.poll(60.0)) == [(0, None)]
    successor._selector.close()
    successor._listener.close()
