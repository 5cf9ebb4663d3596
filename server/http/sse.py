"""Streams: server-sent events, `data: ` and one line of JSON each, with keep-alive comments; or another API's framing.

Before the first byte an error is a status. After it the API's renderer writes the error into the stream, and the stream
ends. However a stream ends, even before its first byte, its answer is closed.
"""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import anyio
import msgspec
from sse_starlette.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send

from weft.server.errors import ApiError, as_api_error, error_body


@dataclass(frozen=True, slots=True)
class Framing:
    """How an API's stream differs from others beside its events.

    Attributes:
        ping: What is sent into silences; empty: nothing, since the API has no such thing.
        after_ping: Sent before the event after a ping, in one chunk with it. Some clients (`vllm bench serve`) strip
            each chunk: a comment reaches their parser without its end, and would swallow the event.
    """

    media_type: str = "text/event-stream"
    ping: bytes = b": ping\n\n"
    after_ping: bytes = b":\n\n"


DATA_ONLY = Framing()
"""Data lines and comments, as OpenAI streams."""

_LINE_BREAKS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
_MARK = "\0text\0"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


def encode_event(message: msgspec.Struct | Mapping[str, object], name: str = "") -> bytes:
    """One event, with a line for its name if it has one. Escapes only characters that some take for line breaks."""
    return (b"event: %b\n" % name.encode() if name else b"") + _frame(_encode(message))


def error_event(error: ApiError) -> bytes:
    """The event for a failure: OpenAI's error object."""
    return _frame(error_body(error))


class TextEvent:
    """The event for every token: encoded once, after that only its text is."""

    def __init__(self, make: Callable[[str], msgspec.Struct], name: str = "") -> None:
        """`make` builds the message from a text. Only strings that the server chose may follow the text."""
        self._head, _, self._tail = encode_event(make(_MARK), name).rpartition(_encode(_MARK))

    def fill(self, text: str) -> bytes:
        """The result of `encode_event` for the message with this text."""
        return self._head + _one_line(_encode(text)) + self._tail


def _frame(body: bytes) -> bytes:
    return b"data: " + _one_line(body) + b"\n\n"


def _one_line(body: bytes) -> bytes:
    if not body.isascii():
        for raw, escaped in _LINE_BREAKS:
            body = body.replace(raw, escaped)
    return body


class EventStream(EventSourceResponse):
    """The response. Calls `close` at its end, however it ends."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        end: Callable[[], bytes],
        error: Callable[[ApiError], bytes],
        *,
        headers: Mapping[str, str],
        ping_s: float,
        close: Callable[[], None],
        framing: Framing = DATA_ONLY,
    ) -> None:
        """Stream encoded events, then the result of `end`, or of `error` if they failed.

        A keep-alive comment follows ping_s of silence (0: none).
        There are no comments without silence: some clients' parsers fail on them.
        """
        self.events = events
        self.end = end
        self.error = error
        self._ping_s = ping_s
        self._last_send_time = time.monotonic()
        self._is_after_ping = False
        self._framing = framing
        ping_s = ping_s if framing.ping else 0
        super().__init__(events, headers={**_HEADERS, **headers}, ping=ping_s, sep="\n", media_type=framing.media_type)
        self.close = close

    async def _stream_response(self, send: Send) -> None:
        """Send the events. The base class's loop would spend a timer, a copy and a log call on each."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self.events) as events:
                async for data in events:
                    self._last_send_time = time.monotonic()
                    await send({"type": "http.response.body", "body": self._after_ping(data), "more_body": True})
            end = self.end()
        except Exception as exc:
            if not isinstance(exc, ApiError):
                _log.exception("a stream failed")
            end = self.error(as_api_error(exc))
        async with self._send_lock:  # the task of pings must not send one after the end
            self.active = False
            await send({"type": "http.response.body", "body": self._after_ping(end), "more_body": False})

    def _after_ping(self, data: bytes) -> bytes:
        if self._is_after_ping:
            self._is_after_ping = False
            data = self._framing.after_ping + data
        return data

    async def _ping(self, send: Send) -> None:
        """Send comments into silences; the base class would send them always."""
        while self.active:
            silent_s = time.monotonic() - self._last_send_time
            if silent_s < self._ping_s:
                await anyio.sleep(self._ping_s - silent_s)
                continue
            async with self._send_lock:
                if self.active:
                    self._last_send_time, self._is_after_ping = time.monotonic(), True
                    await send({"type": "http.response.body", "body": self._framing.ping, "more_body": True})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, then close the answer."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            # The generator's own `finally` does not run if the client leaves before the first event.
            self.close()
