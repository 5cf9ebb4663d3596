"""HTTP/1.1 on one connection: uvicorn's protocol with bounds on what arrives before the app sees it.

Owns the bounds and deadlines of a request that is arriving, and the answer if it breaks them or is not HTTP: an error,
after which the connection is closed. No deadline runs while the app works or a client reads, nor between
requests, where uvicorn's keep-alive has one.

- Pipelining: a request that begins before the answer to the last one has ended is dropped, and the connection closed
  after that answer, as RFC 9112 (9.3.2) allows. Reading goes on, so that a disconnect is noticed.
- Upgrade: a client's wish to upgrade is ignored. The parser would treat all that follows, a body too, as another
  protocol.
"""

import asyncio
import enum
import secrets
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from weft.server import errors
from weft.server.http.limits import Connections
from weft.server.http.middleware import METRICS_PATH, OPEN_PATHS, error_response

MAX_HEADER_BYTES = 64 << 10
"""Bound on request line and headers together, and on other bytes outside a body, such as trailers."""
MAX_NUM_HEADERS = 100
LINGER_S = 1.0
"""How long a refused client is read: its system might drop the answer if bytes were left unread at the close."""
LATE_S = 1.0
"""A timer that fires this much too late means that the event loop stood still, and that bytes may be unread."""

_PROBES = frozenset(path.encode() for path in (*OPEN_PATHS, METRICS_PATH))


class Stage(enum.Enum):
    """What a connection is receiving."""

    IDLE = enum.auto()  # nothing: the request is complete, or none has begun
    EXPECTED = enum.auto()  # a request that has not begun
    HEAD = enum.auto()
    BODY = enum.auto()
    PIPELINED = enum.auto()  # bytes to drop until the answer ends
    REFUSED = enum.auto()  # bytes to drop while the connection lingers


class WeftProtocol(HttpToolsProtocol):
    """One connection; lives on the event loop."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        """Take uvicorn's arguments, and the state that all connections share."""
        super().__init__(*args, **kwargs)
        self.url = b""  # before the first request has one
        self._shared = connections
        self._settings = connections.settings
        self._is_regular = True  # False: beyond the limit, only probes are served
        self._stage = Stage.IDLE
        self._stage_start = self._last_progress = 0.0
        self._num_unused_bytes = 0  # received since the parser last completed something, or dropped
        self._timer: asyncio.TimerHandle | None = None

    # --- the connection's life ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it in; the first request has a deadline from here on."""
        super().connection_made(transport)
        self._is_regular = self._shared.open(self)
        self._enter(Stage.EXPECTED)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it out."""
        super().connection_lost(exc)
        self._shared.close(self)
        if self._timer is not None:
            self._timer.cancel()

    def drop(self) -> None:
        """Close at once: another connection needs the place."""
        self.transport.abort()

    def stop_receiving(self) -> None:
        """Refuse a request whose body is incomplete: the server drains."""
        if self._stage is Stage.BODY and self._is_answering():
            self._answer_and_close(errors.ShuttingDownError("the server is shutting down"))

    def shutdown(self) -> None:
        """End, after the answer that is being given, if any."""
        if self._stage is Stage.REFUSED:
            self.transport.close()
        else:
            super().shutdown()

    # --- bytes in ---

    def data_received(self, data: bytes) -> None:
        """Parse within the bounds."""
        self._num_unused_bytes += len(data)
        if self._is_dropping():
            if self._num_unused_bytes > self._settings.max_body_bytes:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        if self._stage is Stage.IDLE and not self._is_answering():
            self._enter(Stage.EXPECTED)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            if not self._is_dropping():
                cause = error.__context__  # what a callback raised
                malformed = errors.MalformedHttpError("this is no valid HTTP/1.1 request")
                self._refuse(cause if isinstance(cause, errors.ApiError) else malformed)
            return
        if self._num_unused_bytes > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large(f"{self._num_unused_bytes} or more bytes"))
        else:
            self._watch()

    def _feed(self, data: bytes) -> None:
        """Parse. The head of a request that wishes to upgrade is parsed again without that header."""
        try:
            self.parser.feed_data(data)
            return
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        request_line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the base class does
        self.parser.feed_data(b"\r\n".join([request_line, *headers, b"", rest]))

    # --- callbacks of the parser; what they raise ends the parsing ---

    def on_message_begin(self) -> None:
        """Begin a request, or drop it and all that follows if it is pipelined."""
        if self._is_answering():
            self._hang_up_after_answer()
            raise ValueError("pipelined")
        if self._stage is Stage.IDLE:  # directly behind the body of a request that was answered early
            self._unset_keepalive_if_required()
            self._enter(Stage.EXPECTED)
        self._stage = Stage.HEAD
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers of a body are dropped."""
        if self._stage is not Stage.HEAD:
            return
        if len(self.headers) == MAX_NUM_HEADERS:
            raise _headers_too_large(f"{MAX_NUM_HEADERS + 1} or more headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hand the request to the app, unless its head breaks a bound."""
        self._num_unused_bytes = 0
        if self.parser.get_method() == b"CONNECT":
            raise errors.RouteError(405, "method not allowed: CONNECT", {})
        if self.parser.should_upgrade():
            return
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEADER_BYTES:
            raise _headers_too_large(f"{num_bytes} bytes")
        if not self._is_regular and self.url.partition(b"?")[0] not in _PROBES:
            message = f"the server holds at most {self._shared.max_num} connections; try again in a moment"
            raise errors.TooManyConnectionsError(message)
        super().on_headers_complete()
        if not self._is_regular:
            self.cycle.keep_alive = False
        self._enter(Stage.BODY)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._num_unused_bytes = 0
        self._last_progress = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        if self.parser.should_upgrade():
            return
        self._num_unused_bytes = 0
        self._stage = Stage.IDLE
        super().on_message_complete()
        if self.cycle.response_complete:  # answered before its body came, which stopped the keep-alive timer
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # --- deadlines ---

    def _enter(self, stage: Stage) -> None:
        self._stage = stage
        self._stage_start = self._last_progress = self.loop.time()

    def _deadline(self) -> float | None:
        """When the part that is arriving must be complete; None while nothing is expected."""
        settings = self._settings
        if self._stage in (Stage.EXPECTED, Stage.HEAD):
            return self._stage_start + settings.header_timeout_s
        if self._stage is Stage.BODY:
            if self.flow.read_paused:  # the app has not taken what arrived
                self._last_progress = self.loop.time()
            pause_end = self._last_progress + settings.body_pause_timeout_s
            return min(pause_end, self._stage_start + settings.body_timeout_s)
        return None

    def _watch(self) -> None:
        """Set the timer for the deadline. Completing a part does not touch the timer: most parts are in time."""
        deadline = self._deadline()
        if deadline is not None and (self._timer is None or self._timer.when() > deadline):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(deadline, self._look)

    def _look(self) -> None:
        """Refuse the request if its deadline has passed."""
        self._timer = None
        deadline, now = self._deadline(), self.loop.time()
        if deadline is None:
            return
        if now >= deadline + LATE_S:
            self._stage_start = self._last_progress = now
        if not deadline <= now < deadline + LATE_S:
            self._watch()
        elif self._stage is Stage.BODY:
            settings = self._settings
            bounds = f"{settings.body_timeout_s:g} s and pause for at most {settings.body_pause_timeout_s:g} s"
            self._refuse(errors.ReceiveTimeoutError(f"the body must arrive within {bounds}"))
        elif self._stage is Stage.HEAD:
            message = f"the headers must arrive within {self._settings.header_timeout_s:g} s"
            self._refuse(errors.ReceiveTimeoutError(message))
        else:
            self.transport.close()

    # --- the end ---

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _is_dropping(self) -> bool:
        return self._stage in (Stage.PIPELINED, Stage.REFUSED)

    def _drop_what_follows(self, stage: Stage) -> None:
        self._stage = stage
        self._num_unused_bytes = 0
        self.flow.resume_reading()

    def _hang_up_after_answer(self) -> None:
        self.cycle.keep_alive = False
        self._drop_what_follows(Stage.PIPELINED)

    def _refuse(self, error: errors.ApiError) -> None:
        self._shared.note_refused(error)
        if self._stage is Stage.IDLE and self._is_answering():  # it follows a complete request
            self._hang_up_after_answer()
        else:
            self._answer_and_close(error)

    def _answer_and_close(self, error: errors.ApiError) -> None:
        """Send the error, unless the app has begun an answer, and close."""
        if self.transport.is_closing():
            return
        may_answer = True
        if self._stage is Stage.BODY:
            may_answer = not self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._drop_what_follows(Stage.REFUSED)
        if self._timer is not None:
            self._timer.cancel()
        if may_answer:
            self.transport.write(self._response(error))
        if self.transport.can_write_eof():  # not over TLS
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _response(self, error: errors.ApiError) -> bytes:
        path, request_id = self.url.partition(b"?")[0].decode("latin-1"), f"req_{secrets.token_hex(16)}"
        response = error_response(error, {"path": path, "state": {"request_id": request_id}})
        headers = dict([*self.server_state.default_headers, *response.raw_headers])
        headers |= {b"x-request-id": request_id.encode(), b"connection": b"close"}
        lines = [b"%b: %b\r\n" % header for header in headers.items()]
        return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", response.body])


def _headers_too_large(got: str) -> errors.HeadersTooLargeError:
    bounds = f"{MAX_HEADER_BYTES} bytes and {MAX_NUM_HEADERS} headers"
    return errors.HeadersTooLargeError(f"request line and headers must have at most {bounds}, got {got}")
