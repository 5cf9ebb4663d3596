"""Middleware for every request, and the error responses that it and the routes write.

The middleware adds id and timing headers, answers for unexpected errors, drains, and limits bodies. It is plain ASGI:
streams pass through untouched. Order, from the outside: request headers, origin, last resort, authentication, drain,
body.

An error response has the shape of the API whose route was asked. The path alone decides, so that middleware and the
protocol answer as the route would. Without an entry in the table it is OpenAI's shape. A model list for Anthropic's
clients has OpenAI's path; their header tells them apart.
"""

import logging
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.server import errors
from weft.server.http.limits import Lifecycle

ANTHROPIC_VERSION = b"anthropic-version"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_LLAMA_CPP_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "unavailable_error",
}


def anthropic_error(error: errors.ApiError, request_id: str | None) -> bytes:
    """Anthropic's error object as JSON."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = errors.error_text(error)
    if isinstance(error, errors.ContextLengthError) and error.num_tokens > error.max_num_tokens:
        # In Anthropic's words, at whose beginning clients know that they must compact the conversation.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_num_tokens} maximum: {message}"
    members: dict[str, object] = {"type": kind, "message": message}
    if error.code is not None:
        members["details"] = {"error_code": error.code}
    return msgspec.json.encode({"type": "error", "error": members, "request_id": request_id})


def ollama_error(error: errors.ApiError, request_id: str | None = None) -> bytes:
    """Ollama's error object as JSON."""
    return msgspec.json.encode({"error": errors.error_text(error)})


def llama_cpp_error(error: errors.ApiError, request_id: str | None = None) -> bytes:
    """llama.cpp's error object as JSON."""
    kind = _LLAMA_CPP_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"error": {"code": error.status, "message": errors.error_text(error), "type": kind}})


_SHAPES: Mapping[str, Callable[[errors.ApiError, str | None], bytes]] = {
    "/v1/messages": anthropic_error,
    "/api": ollama_error,
    "/completion": llama_cpp_error,
    "/infill": llama_cpp_error,
}
"""Shapes by the beginning of the path, up to a slash."""


def asks_in_anthropics_way(scope: Mapping[str, Any]) -> bool:
    """Whether the request comes from a client of Anthropic's API."""
    return any(name == ANTHROPIC_VERSION for name, _ in scope.get("headers", ()))


def error_response(error: errors.ApiError, scope: Mapping[str, Any]) -> Response:
    """The whole response to a request that failed before its first byte was sent."""
    path, request_id = scope.get("path", ""), scope.get("state", {}).get("request_id")
    shape = next((shape for at, shape in _SHAPES.items() if path == at or path.startswith(f"{at}/")), None)
    if shape is None and path.startswith("/v1/models") and asks_in_anthropics_way(scope):
        shape = anthropic_error
    body = shape(error, request_id) if shape else errors.error_body(error)
    return Response(body, error.status, dict(error.headers), media_type="application/json")


OPEN_PATHS = frozenset({"/health", "/ready"})
METRICS_PATH = "/metrics"

FILES_PATH = "/v1/files"
UPLOADS_PATH = "/v1/uploads/"
FORM_BYTES = 64 << 10
"""What a form may hold beside its file."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")
_LOOKING = OPEN_PATHS | {METRICS_PATH, "/stats"}

_log = logging.getLogger(__name__)


class HttpMiddleware(ABC):
    """Base class: `serve` gets HTTP requests, everything else goes straight to the app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one request. Not a coroutine itself: every one would slow down each event of a stream."""
        return (self.serve if scope["type"] == "http" else self._app)(scope, receive, send)

    @abstractmethod
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one HTTP request."""


class RequestHeadersMiddleware(HttpMiddleware):
    """Puts x-request-id, openai-processing-ms and openai-model on every response."""

    def __init__(self, app: ASGIApp, model_name: str) -> None:
        """`model_name` stands in the header of a request that names no model."""
        super().__init__(app)
        self._model_name = model_name

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, with the headers on its response; the id also under Anthropic's name, on its routes."""
        start_time = time.perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        state = scope.setdefault("state", {})
        echoes = (b"x-request-id", b"request-id") if scope["path"].startswith("/v1/messages") else (b"x-request-id",)
        state.update(arrival_time=time.monotonic(), request_id=request_id, model_name=self._model_name)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                processing_ms = int((time.perf_counter() - start_time) * 1000)
                message["headers"] = [
                    *message.get("headers", ()),
                    *((name, request_id.encode()) for name in echoes),
                    (b"openai-processing-ms", str(processing_ms).encode()),
                    (b"openai-model", quote(state["model_name"], safe="/:@+ ").encode()),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class LastResortMiddleware(HttpMiddleware):
    """Answers for unexpected failures before the response has begun, and logs them under the request's id."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, and answer if it fails."""
        is_started = False

        async def send_noted(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception as exc:
            if is_started:
                raise
            _log.exception("request %s failed", scope["state"]["request_id"])
            await error_response(errors.as_api_error(exc), scope)(scope, receive, send)


class DrainMiddleware(HttpMiddleware):
    """Counts requests in and out, and refuses new ones while draining.

    Probes and the chat page's /stats, which comes twice a second, are neither counted nor refused.
    """

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        super().__init__(app)
        self._lifecycle = lifecycle

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count, or refuse, the request."""
        if scope["path"] in _LOOKING:
            await self._app(scope, receive, send)
        elif self._lifecycle.draining:
            await error_response(errors.ShuttingDownError("the server is shutting down"), scope)(scope, receive, send)
        else:
            self._lifecycle.enter()
            try:
                await self._app(scope, receive, send)
            finally:
                self._lifecycle.leave()


class BodyLimitMiddleware(HttpMiddleware):
    """Refuses a body that is too long before it is parsed: at once if its length is declared, else while it arrives."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_file_bytes: int) -> None:
        """Bound bodies by `max_body_bytes`, and those with a file by `max_file_bytes`."""
        super().__init__(app)
        self._max_body_bytes = max_body_bytes
        self._max_form_bytes = max_file_bytes + FORM_BYTES

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or serve it with a bound on its body."""
        is_form = scope["path"] == FILES_PATH or (
            scope["path"].startswith(UPLOADS_PATH) and scope["path"].endswith("/parts")
        )
        bound = self._max_form_bytes if is_form else self._max_body_bytes
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > bound:
            error = errors.BodyTooLargeError(_message(bound, f"got {declared}"))
            await error_response(error, scope)(scope, receive, send)
            return
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > bound:
                # The only exception that FastAPI does not replace while it reads a body.
                raise HTTPException(413, _message(bound, "got more"))
            return message

        await self._app(scope, receive_counted, send)


def _message(max_bytes: int, got: str) -> str:
    return f"the body must have at most {max_bytes} bytes, {got}"
