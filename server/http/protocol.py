"""HTTP/1.1 on one connection: uvicorn's protocol, with bounds on what comes before the app sees it.

Owns, while a request arrives, its bounds in bytes and headers, its deadlines, and the answer when it breaks them or is
no HTTP: OpenAI's error object, after which the connection is closed. No deadline runs while the app works or a client
reads, nor between requests, where uvicorn's keep-alive has one.

- A request counts as pipelined when it begins before the answer to the one before it has ended. It is dropped, and the
  connection closed after that answer, as RFC 9112 (9.3.2) allows. Reading goes on, so that a disconnect is seen.
- A wish to upgrade is ignored: the parser would hand over what follows as another protocol's, a body too.
"""

import asyncio
import enum
import secrets
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from weft.server.errors import (
    ApiError,
    HeadersTooLargeError,
    MalformedHttpError,
    ReceiveTimeoutError,
    RouteError,
    ShuttingDownError,
    TooManyConnectionsError,
    error_body,
)
from weft.server.http.auth import METRICS_PATH, OPEN_PATHS
from weft.server.http.connections import Connections

MAX_HEADER_BYTES = 64 << 10
"""Of request line and headers; and of anything else that comes without being part of a body, such as trailers."""
MAX_NUM_HEADERS = 100
LINGER_S = 1.0
"""After a refusal: what the client still sends is read for so long, or else its system might drop the answer."""
LATE_S = 1.0
"""A timer that is so much too late says that the event loop stood still, with bytes unread."""

_PROBES = frozenset(path.encode() for path in (*OPEN_PATHS, METRICS_PATH))


class Stage(enum.Enum):
    """What of a request is being received."""

    NOTHING = enum.auto()  # it is here, or none has begun
    HEAD = enum.auto()
    BODY = enum.auto()


class WeftProtocol(HttpToolsProtocol):
    """One connection; lives on the event loop."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        """Take uvicorn's arguments, and what all connections share."""
        super().__init__(*args, **kwargs)
        self._shared = connections
        self._settings = connections.settings
        self._is_regular = True
        self._stage = Stage.NOTHING
        self._stage_start = self._last_progress = 0.0
        self._has_begun = False  # there is a part of the head
        self._num_unused_bytes = 0  # since the parser last made something of them
        self._num_dropped_bytes = 0
        self._is_deaf = False  # what comes is dropped
        self._is_refused = False
        self._error: ApiError | None = None  # why a callback stopped the parser; None: it stopped itself
        self._timer: asyncio.TimerHandle | None = None

    # --- the connection's life ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it in; the first headers have a deadline from here on."""
        super().connection_made(transport)
        self._is_regular = self._shared.open(self)
        self._enter(Stage.HEAD)
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
        """The server drains: refuse a request whose body is still to come."""
        if self._stage is Stage.BODY and self._is_answering() and not self._is_refused:
            self._answer_and_close(ShuttingDownError("the server is shutting down"))

    def shutdown(self) -> None:
        """End, after the answer that is being given, if any."""
        if self._is_refused:
            self.transport.close()
        else:
            super().shutdown()

    # --- bytes in ---

    def data_received(self, data: bytes) -> None:
        """Parse what came, within the bounds."""
        if self._is_deaf:
            self._num_dropped_bytes += len(data)
            if self._num_dropped_bytes > self._settings.max_body_bytes:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        if self._stage is Stage.NOTHING and not self._is_answering():
            self._enter(Stage.HEAD)
        self._num_unused_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if not self._is_deaf:
                self._refuse(self._error or MalformedHttpError("this is no valid HTTP/1.1 request"))
            return
        if self._num_unused_bytes > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large(f"{self._num_unused_bytes} or more bytes"))
        else:
            self._watch()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            lines = [self._request_line, *(b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the base class has it
            self.parser.feed_data(b"\r\n".join([*lines, b"", data[upgrade.args[0] :]]))

    def _stop(self, error: ApiError) -> Exception:
        """What a callback raises to end parsing."""
        self._error = error
        return ValueError(error.message)

    # --- what the parser calls ---

    def on_message_begin(self) -> None:
        """A request begins; one that is pipelined is dropped, with all that follows."""
        if self._is_answering():
            self._hang_up_after_answer()
            raise ValueError("pipelined")
        if self._stage is Stage.NOTHING:  # right behind the body of a request that was answered before
            self._unset_keepalive_if_required()
            self._enter(Stage.HEAD)
        self._has_begun = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers of a body are dropped."""
        if self._stage is not Stage.HEAD:
            return
        if len(self.headers) == MAX_NUM_HEADERS:
            raise self._stop(_headers_too_large(f"{MAX_NUM_HEADERS + 1} or more headers"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hand the request to the app, unless its headers are beyond the bounds."""
        self._num_unused_bytes = 0
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise self._stop(RouteError(405, "method not allowed: CONNECT", {}))
        if self.parser.should_upgrade():
            self._request_line = b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())
            return  # it is parsed again
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEADER_BYTES:
            raise self._stop(_headers_too_large(f"{num_bytes} bytes"))
        if not self._is_regular and self.url.partition(b"?")[0] not in _PROBES:
            message = f"the server holds at most {self._shared.max_num} connections; try again in a moment"
            raise self._stop(TooManyConnectionsError(message))
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
        """The request is here."""
        if self.parser.should_upgrade():
            return
        self._num_unused_bytes = 0
        self._stage = Stage.NOTHING
        super().on_message_complete()
        if self.cycle.response_complete:  # it was answered before its body came, which stopped the keep-alive's timer
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # --- deadlines ---

    def _enter(self, stage: Stage) -> None:
        self._stage = stage
        self._stage_start = self._last_progress = self.loop.time()
        if stage is Stage.HEAD:
            self._has_begun = False

    def _deadline(self) -> float | None:
        """When what is being received must be here; None while nothing is."""
        settings = self._settings
        if self._stage is Stage.HEAD:
            return self._stage_start + settings.header_timeout_s
        if self._stage is Stage.BODY:
            if self.flow.read_paused:  # the app has not taken what came
                self._last_progress = self.loop.time()
            pause_end = self._last_progress + settings.body_pause_timeout_s
            return min(pause_end, self._stage_start + settings.body_timeout_s)
        return None

    def _watch(self) -> None:
        """Have the deadline looked at when it comes. What has arrived by then leaves the timer as it is: most do."""
        deadline = self._deadline()
        if deadline is not None and (self._timer is None or self._timer.when() > deadline):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(deadline, self._look)

    def _look(self) -> None:
        """Refuse a request whose deadline has passed."""
        self._timer = None
        deadline, now = self._deadline(), self.loop.time()
        if deadline is None or self._is_deaf:
            return
        if now >= deadline + LATE_S:
            self._stage_start = self._last_progress = now
        if now < deadline or now >= deadline + LATE_S:
            self._watch()
        elif self._stage is Stage.BODY:
            settings = self._settings
            bounds = f"{settings.body_timeout_s:g} s and pause for at most {settings.body_pause_timeout_s:g} s"
            self._refuse(ReceiveTimeoutError(f"the body must arrive within {bounds}"))
        elif self._has_begun:
            self._refuse(ReceiveTimeoutError(f"the headers must arrive within {self._settings.header_timeout_s:g} s"))
        else:
            self.transport.close()

    # --- the end ---

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _hang_up_after_answer(self) -> None:
        self._is_deaf = True
        self.cycle.keep_alive = False
        self.flow.resume_reading()

    def _refuse(self, error: ApiError) -> None:
        self._shared.note_refused(error)
        if self._stage is Stage.NOTHING and self._is_answering():  # it follows a request that is whole
            self._hang_up_after_answer()
        else:
            self._answer_and_close(error)

    def _answer_and_close(self, error: ApiError) -> None:
        """Answer from here, unless the app has begun to, and close."""
        if self.transport.is_closing():
            return
        may_answer = self._stage is not Stage.BODY or not self.cycle.response_started
        if self._stage is Stage.BODY:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._is_deaf = self._is_refused = True
        self.flow.resume_reading()
        if self._timer is not None:
            self._timer.cancel()
        if may_answer:
            self.transport.write(self._response(error))
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _response(self, error: ApiError) -> bytes:
        body = error_body(error)
        headers = {
            **error.headers,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": f"req_{secrets.token_hex(16)}",
            "connection": "close",
        }
        lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        lines += [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body])


def _headers_too_large(got: str) -> HeadersTooLargeError:
    bounds = f"{MAX_HEADER_BYTES} bytes and {MAX_NUM_HEADERS} headers"
    return HeadersTooLargeError(f"request line and headers must have at most {bounds}, got {got}")
