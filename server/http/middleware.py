"""What surrounds every request: its id and timing headers, the last resort for errors, the drain, the body limit.

Plain ASGI: streams pass through untouched. Order, from the outside: request headers, origin, last resort,
authentication, drain, body.
"""

import logging
import re
import secrets
import time
from urllib.parse import quote

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.server.errors import BodyTooLargeError, ShuttingDownError, as_api_error, error_response
from weft.server.http.auth import METRICS_PATH, OPEN_PATHS
from weft.server.http.lifecycle import Lifecycle

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")

_LOOKING = OPEN_PATHS | {METRICS_PATH, "/stats"}

_log = logging.getLogger(__name__)


class RequestHeadersMiddleware:
    """Puts x-request-id, openai-processing-ms and openai-model on every response."""

    def __init__(self, app: ASGIApp, model_name: str) -> None:
        self._app = app
        self._model_name = quote(model_name, safe="/:@+ ").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_time = time.perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {}).update(arrival_time=time.monotonic(), request_id=request_id)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                processing_ms = int((time.perf_counter() - start_time) * 1000)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    (b"openai-processing-ms", str(processing_ms).encode()),
                    (b"openai-model", self._model_name),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class LastResortMiddleware:
    """Answers for whatever fails before its response has begun, and logs it under the request's id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_started = False

        async def send_noted(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception as exc:
            if is_started or scope["type"] != "http":
                raise
            _log.exception("request %s failed", scope["state"]["request_id"])
            await error_response(as_api_error(exc))(scope, receive, send)


class DrainMiddleware:
    """Counts requests in and out, and refuses new ones while draining.

    Those that only look are neither counted nor refused: a page that is open asks for /stats twice a second.
    """

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http" or scope["path"] in _LOOKING:
            await self._app(scope, receive, send)
            return
        if self._lifecycle.draining:
            await error_response(ShuttingDownError("the server is shutting down"))(scope, receive, send)
            return
        self._lifecycle.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._lifecycle.leave()


class BodyLimitMiddleware:
    """Refuses a body that is too long before it is parsed: at once if its length is declared, else while it comes."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            error = BodyTooLargeError(self._message(f"got {declared}"))
            await error_response(error)(scope, receive, send)
            return
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                # The one kind of exception that FastAPI lets through while it reads a body.
                raise HTTPException(413, self._message("got more"))
            return message

        await self._app(scope, receive_counted, send)

    def _message(self, got: str) -> str:
        return f"the body must have at most {self._max_body_bytes} bytes, {got}"
