"""One connection without a socket: tests feed it bytes and read back what it writes."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from weft.server.http.limits import Connections
from weft.server.http.protocol import MAX_HEADER_BYTES, MAX_NUM_HEADERS, WeftProtocol
from weft.server.settings import Settings

TIMEOUT_S = 60.0
"""Longest wait; reached only in a failure."""
HEAD = b"POST /v1 HTTP/1.1\r\nHost: a\r\n"
WHOLE = HEAD + b"Content-Length: 3\r\n\r\nabc"


class MemoryTransport(asyncio.Transport):
    """Stands in for a socket, and tells the protocol of the end as a socket would."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.has_eof = False
        self.is_reading = True
        self._is_closing = False
        self.protocol: WeftProtocol | None = None

    def write(self, data: Any) -> None:
        assert not self.has_eof
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_eof = True

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            assert self.protocol is not None
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    @property
    def is_over(self) -> bool:
        """Whether no more answers can come."""
        return self.has_eof or self._is_closing


class App:
    """Answers 200 with the body it got once `may_answer` is set, and records what it saw."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.num_started = 0
        self.num_disconnected = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.answers_early = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        self.num_started += 1
        body, more = b"", not self.answers_early
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_disconnected += 1
                return
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        waiting = asyncio.ensure_future(self.may_answer.wait())
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            self.num_disconnected += 1
            waiting.cancel()
            return
        leaving.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


class Site:
    """An app, and the connections to it."""

    def __init__(self, max_num_files: int = 1000, **settings: Any) -> None:
        self.app = App()
        self.shared = Connections(Settings(**settings), max_num_files)
        self._config = uvicorn.Config(self.app, log_config=None, access_log=False, lifespan="off")
        self._state = ServerState()

    def connect(self) -> tuple[WeftProtocol, MemoryTransport]:
        transport = MemoryTransport()
        protocol = WeftProtocol(connections=self.shared, config=self._config, server_state=self._state, app_state={})
        transport.protocol = protocol
        protocol.connection_made(transport)
        return protocol, transport

    async def close(self) -> None:
        for connection in list(self._state.connections):
            connection.transport.abort()
        self.app.may_answer.set()
        await wait_for(lambda: not self._state.tasks)


@asynccontextmanager
async def open_site(**settings: Any) -> AsyncIterator[Site]:
    site = Site(**settings)
    yield site
    await site.close()


async def wait_for(condition: Callable[[], bool]) -> None:
    end_time = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_time
        await asyncio.sleep(0.002)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def status(transport: MemoryTransport) -> int:
    """The status of the first answer; 0 if there is none."""
    return int(transport.written.split(b" ", 2)[1]) if transport.written else 0


def error(transport: MemoryTransport) -> dict[str, Any]:
    """The error object of the only answer, after which the connection must end."""
    head, _, body = bytes(transport.written).partition(b"\r\n\r\n")
    assert transport.written.count(b"content-length: ") == 1
    lines = head.decode().lower().split("\r\n")
    assert "connection: close" in lines
    assert "content-type: application/json" in lines
    assert f"content-length: {len(body)}" in lines
    assert any(line.startswith("x-request-id: req_") for line in lines)
    assert transport.is_over
    found = json.loads(body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return dict(found)


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (HEAD + b"X: ", b"x"),
        (HEAD, b"y"),
        (b"GET /", b"z"),
        (HEAD, b"a: b\r\n"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"x"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;x=", b"x"),
    ],
    ids=["value", "name", "url", "many", "trailer", "chunk extension"],
)
@pytest.mark.parametrize("piece", [1000, 150_000])
def test_what_comes_without_end_is_refused(start: bytes, more: bytes, piece: int) -> None:
    """An endless header was collected in memory, in quadratic time."""

    async def test() -> None:
        async with open_site() as site:
            protocol, transport = site.connect()
            num_bytes = len(start)
            protocol.data_received(start)
            while not transport.is_over:
                protocol.data_received(more * (piece // len(more)))
                num_bytes += piece
            assert num_bytes <= MAX_HEADER_BYTES + len(start) + piece
            assert (status(transport), error(transport)["code"]) == (431, "headers_too_large")
            assert f"{MAX_HEADER_BYTES} bytes and {MAX_NUM_HEADERS} headers" in error(transport)["message"]
            await wait_for(lambda: site.app.num_disconnected == site.app.num_started)

    run(test)


def test_headers_within_the_bounds_are_read() -> None:
    async def test() -> None:
        async with open_site() as site:
            _, transport = site.connect()
            assert transport.protocol is not None
            head = b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: v\r\n" % i for i in range(MAX_NUM_HEADERS - 1))
            for byte in head + b"last: " + b"x" * (MAX_HEADER_BYTES - 2000) + b"\r\n\r\n":
                transport.protocol.data_received(bytes([byte]))
            await wait_for(lambda: status(transport) == 200)

    run(test)


@pytest.mark.parametrize(
    "head", [b"h: v\r\n" * (MAX_NUM_HEADERS + 1), b"h: " + b"x" * MAX_HEADER_BYTES + b"\r\n"], ids=["number", "bytes"]
)
def test_headers_beyond_the_bounds_in_one_piece_are_refused(head: bytes) -> None:
    async def test() -> None:
        async with open_site() as site:
            protocol, transport = site.connect()
            protocol.data_received(b"GET / HTTP/1.1\r\n" + head + b"\r\n")
            assert (status(transport), error(transport)["code"]) == (431, "headers_too_large")
            assert site.app.num_started == 0

    run(test)


@pytest.mark.parametrize(
    ("pieces", "setting", "message"),
    [
        ([HEAD], {"header_timeout_s": 0.05}, "the headers must arrive within 0.05 s"),
        (
            [HEAD + b"Content-Length: 9\r\n\r\n", b"a"],
            {"body_pause_timeout_s": 0.05},
            "the body must arrive within 300 s and pause for at most 0.05 s",
        ),
    ],
    ids=["headers", "body"],
)
def test_half_a_request_is_answered_after_its_deadline(
    pieces: list[bytes], setting: dict[str, float], message: str
) -> None:
    """It was held for ever."""

    async def test() -> None:
        async with open_site(**setting) as site:
            protocol, transport = site.connect()
            for piece in pieces:
                protocol.data_received(piece)
            await wait_for(lambda: transport.is_over)
            assert (status(transport), error(transport)["code"]) == (408, "receive_timeout")
            assert error(transport)["message"] == message
            await wait_for(lambda: site.app.num_disconnected == site.app.num_started)

    run(test)


@pytest.mark.parametrize(
    ("start", "setting"),
    [
        (HEAD + b"X: ", {"header_timeout_s": 0.1}),
        (HEAD + b"Content-Length: 900000\r\n\r\n", {"body_timeout_s": 0.1}),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n900000\r\n", {"body_timeout_s": 0.1}),
    ],
    ids=["headers", "body", "chunked"],
)
def test_a_trickle_is_cut_in_spite_of_its_progress(start: bytes, setting: dict[str, float]) -> None:
    async def test() -> None:
        async with open_site(**setting) as site:
            protocol, transport = site.connect()
            protocol.data_received(start)
            end_time = time.monotonic() + TIMEOUT_S
            while not transport.is_over:
                assert time.monotonic() < end_time
                await asyncio.sleep(0.01)
                protocol.data_received(b"a")
            assert status(transport) == 408

    run(test)


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_a_connection_that_asks_nothing_is_closed_without_a_word(sent: bytes) -> None:
    async def test() -> None:
        async with open_site(header_timeout_s=0.05) as site:
            protocol, transport = site.connect()
            protocol.data_received(sent)
            await wait_for(lambda: transport.is_over)
            assert not transport.written

    run(test)


def test_no_deadline_runs_while_the_app_works_or_between_requests() -> None:
    async def test() -> None:
        async with open_site(header_timeout_s=0.02, body_pause_timeout_s=0.02, body_timeout_s=0.02) as site:
            protocol, transport = site.connect()
            for number in (1, 2):
                site.app.may_answer.clear()
                protocol.data_received(WHOLE)
                await asyncio.sleep(0.2)
                assert not transport.is_over
                site.app.may_answer.set()
                await wait_for(lambda number=number: transport.written.count(b"HTTP/1.1 200") == number)  # type: ignore[misc]
                await asyncio.sleep(0.2)
                assert not transport.is_over

    run(test)


def test_a_loop_that_stood_still_grants_the_time_again() -> None:
    """asyncio runs timers before it reads the bytes that arrived in the meantime."""

    async def test() -> None:
        async with open_site(header_timeout_s=0.1) as site:
            protocol, transport = site.connect()
            protocol.data_received(HEAD)
            asyncio.get_running_loop().call_later(0.05, time.sleep, 1.5)
            await asyncio.sleep(0.06)
            assert not transport.is_over
            protocol.data_received(b"Content-Length: 3\r\n\r\nabc")
            await wait_for(lambda: status(transport) == 200)

    run(test)


def test_what_is_no_http_is_told_so_in_json_and_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """The answer was plain text, and every connection wrote a log line."""

    async def test() -> None:
        async with open_site() as site:
            for garbage in [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\na b: c\r\n\r\n"] * 20:
                protocol, transport = site.connect()
                protocol.data_received(garbage)
                assert (status(transport), error(transport)["code"]) == (400, "malformed_http")
                assert error(transport)["type"] == "invalid_request_error"

    run(test)
    assert len(caplog.records) == 1


def test_garbage_in_a_body_ends_the_request() -> None:
    async def test() -> None:
        async with open_site() as site:
            protocol, transport = site.connect()
            protocol.data_received(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nnonsense\r\n")
            assert error(transport)["code"] == "malformed_http"
            await wait_for(lambda: site.app.num_disconnected == 1)

    run(test)


@pytest.mark.parametrize("cut", range(1, 140, 7))
def test_a_wish_to_upgrade_is_ignored_and_the_body_kept(cut: int) -> None:
    """The parser treated the body as another protocol, so every POST of Java's HTTP client came without a body."""
    lines = [b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAEA", b"Upgrade: h2c", b"Content-Length: 3"]
    request = HEAD + b"\r\n".join([*lines, b"", b"abc"])

    async def test() -> None:
        async with open_site() as site:
            protocol, transport = site.connect()
            protocol.data_received(request[:cut])
            protocol.data_received(request[cut:])
            await wait_for(lambda: status(transport) == 200)
            assert site.app.bodies == [b"abc"]
            protocol.data_received(request)
            await wait_for(lambda: len(site.app.bodies) == 2)

    run(test)


def test_connect_is_refused() -> None:
    async def test() -> None:
        async with open_site() as site:
            protocol, transport = site.connect()
            protocol.data_received(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n")
            assert status(transport) == 405
            assert error(transport)["message"] == "method not allowed: CONNECT"

    run(test)


@pytest.mark.parametrize("second", [WHOLE, b"nonsense\r\n\r\n", b"x" * 200_000])
@pytest.mark.parametrize("is_one_piece", [True, False])
def test_a_pipelined_request_hides_no_disconnect(second: bytes, is_one_piece: bool) -> None:
    """Reading was paused until the first answer had ended, so a disconnect went unnoticed."""

    async def test() -> None:
        async with open_site() as site:
            site.app.may_answer.clear()
            protocol, transport = site.connect()
            if is_one_piece:
                protocol.data_received(WHOLE + second)
            else:
                protocol.data_received(WHOLE)
                protocol.data_received(second)
            await wait_for(lambda: site.app.bodies == [b"abc"])
            assert transport.is_reading
            protocol.connection_lost(None)  # as a socket does that is being read
            await wait_for(lambda: site.app.num_disconnected == 1)

    run(test)


def test_a_pipelined_request_is_dropped_and_the_connection_closed_after_the_first_answer() -> None:
    async def test() -> None:
        async with open_site() as site:
            protocol, transport = site.connect()
            protocol.data_received(WHOLE + WHOLE)
            protocol.data_received(WHOLE)
            await wait_for(lambda: transport.is_over)
            assert bytes(transport.written).count(b"HTTP/1.1 200") == 1
            assert b"connection: close" in transport.written
            assert site.app.num_started == 1

    run(test)


def test_blank_lines_after_a_body_are_no_request() -> None:
    async def test() -> None:
        async with open_site() as site:
            protocol, transport = site.connect()
            protocol.data_received(WHOLE + b"\r\n")
            await wait_for(lambda: status(transport) == 200)
            assert not transport.is_over
            protocol.data_received(WHOLE)
            await wait_for(lambda: site.app.bodies == [b"abc"] * 2)

    run(test)


def test_a_request_right_behind_a_body_that_nobody_waited_for_is_served() -> None:
    async def test() -> None:
        async with open_site() as site:
            protocol, transport = site.connect()
            site.app.answers_early = True
            protocol.data_received(WHOLE[:-1])
            await wait_for(lambda: status(transport) == 200)
            site.app.answers_early = False
            protocol.data_received(WHOLE[-1:] + WHOLE)
            await wait_for(lambda: site.app.bodies == [b"", b"abc"])

    run(test)


def test_a_body_that_trickles_behind_its_answer_is_cut_and_an_idle_connection_after_it_too() -> None:
    async def test() -> None:
        async with open_site(body_pause_timeout_s=0.05) as site:
            site.app.answers_early = True
            connections = [site.connect(), site.connect()]
            for protocol, transport in connections:
                protocol.timeout_keep_alive = 0.05  # type: ignore[assignment]
                protocol.data_received(WHOLE[:-1])
                await wait_for(lambda transport=transport: status(transport) == 200)  # type: ignore[misc]
            connections[0][0].data_received(b"c")
            for _, transport in connections:
                await wait_for(lambda transport=transport: transport.is_over)  # type: ignore[misc]
                assert transport.written.count(b"HTTP/1.1") == 1

    run(test)


def test_draining_drops_the_requests_whose_body_is_to_come() -> None:
    """One unfinished body made SIGTERM wait out the drain."""

    async def test() -> None:
        async with open_site() as site:
            site.app.may_answer.clear()
            half, whole, silent = site.connect(), site.connect(), site.connect()
            half[0].data_received(WHOLE[:-1])
            whole[0].data_received(WHOLE)
            await wait_for(lambda: site.app.num_started == 2)
            for _ in range(2):  # a second signal asked again, which ended the drain with an error
                for protocol, _ in (half, whole, silent):
                    protocol.stop_receiving()
            assert (status(half[1]), error(half[1])["code"]) == (503, "shutting_down")
            await wait_for(lambda: site.app.num_disconnected == 1)
            assert not whole[1].is_over
            assert not silent[1].is_over
            site.app.may_answer.set()
            await wait_for(lambda: status(whole[1]) == 200)

    run(test)


def test_draining_leaves_alone_whom_a_deadline_has_refused() -> None:
    """While its connection lingered, SIGTERM tried to answer again, failed, and had no effect."""

    async def test() -> None:
        async with open_site(body_pause_timeout_s=0.05) as site:
            protocol, transport = site.connect()
            protocol.data_received(WHOLE[:-1])
            await wait_for(lambda: status(transport) == 408)
            protocol.stop_receiving()
            assert error(transport)["code"] == "receive_timeout"

    run(test)


def test_connections_beyond_the_limit_get_503_but_for_probes() -> None:
    async def test() -> None:
        async with open_site(max_connections=2) as site:
            held = [site.connect(), site.connect()]
            protocol, transport = site.connect()
            protocol.data_received(HEAD)
            protocol.data_received(b"Content-Length: 3\r\n\r\n")
            assert (status(transport), error(transport)["code"]) == (503, "too_many_connections")
            assert b"retry-after: " in transport.written
            assert "at most 2 connections" in error(transport)["message"]
            for path in (b"/health", b"/ready?x", b"/metrics"):
                protocol, probe = site.connect()
                protocol.data_received(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n")
                await wait_for(lambda probe=probe: status(probe) == 200)  # type: ignore[misc]
                assert probe.is_over
            held[0][1].close()
            await asyncio.sleep(0)
            protocol, transport = site.connect()
            protocol.data_received(WHOLE)
            await wait_for(lambda: status(transport) == 200)

    run(test)


def test_of_too_many_connections_the_oldest_gives_way() -> None:
    async def test() -> None:
        async with open_site(max_num_files=32) as site:
            assert site.shared.max_num == 24
            connections = [site.connect()[1] for _ in range(100)]
            assert [transport.is_over for transport in connections] == [False] * 24 + [True] * 74 + [False] * 2

    run(test)


def test_a_refused_request_gets_the_error_of_its_api() -> None:
    """Requests that never reach the app get the shape of the API that they asked."""

    async def test() -> None:
        async with open_site() as site:
            protocol, transport = site.connect()
            head = b"POST /v1/messages?beta=true HTTP/1.1\r\nHost: a\r\n"
            protocol.data_received(head + b"a: b\r\n" * (MAX_NUM_HEADERS + 1) + b"\r\n")
            headers, _, body = bytes(transport.written).partition(b"\r\n\r\n")
            error = json.loads(body)
            assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
            assert f"x-request-id: {error['request_id']}".encode() in headers

    run(test)
