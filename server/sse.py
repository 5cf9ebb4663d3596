"""Server-sent events as OpenAI frames them: `data: ` + one line of JSON, comments as keep-alive, `[DONE]`.

Before the first byte an error is a status; from then on it is an event with the same body, after which the stream
ends in order. Whatever way a stream ends, also when its body was never begun, its answer is closed.
"""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import msgspec
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send

from server.errors import ApiError, InternalError, as_api_error, error_body

DONE = b"data: [DONE]\n\n"


class _Silence(ServerSentEvent):
    """Takes the place of a keep-alive that is not needed."""

    def encode(self) -> bytes:
        return b""


_PING = ServerSentEvent(comment="ping", sep="\n")
_SILENCE = _Silence()
_LINE_BREAKS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


def event(message: msgspec.Struct) -> bytes:
    """One event. Text stays as it is, but for characters that some clients take for the end of a line."""
    return _frame(_encode(message))


def _frame(body: bytes) -> bytes:
    for raw, escaped in _LINE_BREAKS:
        if raw in body:
            body = body.replace(raw, escaped)
    return b"data: " + body + b"\n\n"


async def with_ending(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Pass events on, turn an error into an event, and end with [DONE]."""
    try:
        async with aclosing(events):
            async for data in events:
                yield data
    except Exception as exc:
        error = as_api_error(exc)
        if isinstance(error, InternalError) and not isinstance(exc, ApiError):
            _log.exception("a stream failed")
        yield _frame(error_body(error))
    yield DONE


class EventStream(EventSourceResponse):
    """The response; calls `close` once it is over, however it ends."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        headers: Mapping[str, str],
        ping_s: float,
        close: Callable[[], None],
    ) -> None:
        """Stream encoded events, with a keep-alive comment after ping_s to 2 ping_s seconds of silence (0: none).

        A stream that flows gets none: some clients' parsers stumble over comments.
        """
        self._ping_s = ping_s
        self._last_event_time = 0.0
        super().__init__(
            self._timed(with_ending(events)),
            headers={**_HEADERS, **headers},
            ping=ping_s,
            sep="\n",
            ping_message_factory=self._keep_alive,
        )
        self._close = close

    async def _timed(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            async for data in events:
                self._last_event_time = time.monotonic()
                yield data

    def _keep_alive(self) -> ServerSentEvent:
        return _PING if time.monotonic() - self._last_event_time >= self._ping_s else _SILENCE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            # The generator's own `finally` does not run when the client left before its first event.
            self._close()
