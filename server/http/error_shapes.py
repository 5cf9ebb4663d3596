"""Writes an error response in the shape of the API whose route was asked.

The path alone decides, so that middleware and the protocol answer as the route would. Without an entry in the table it
is OpenAI's shape. A model list for Anthropic's clients has OpenAI's path; their header tells them apart.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from weft.server.errors import ApiError, error_body, error_text

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


def anthropic_error(error: ApiError, request_id: str | None) -> bytes:
    """Anthropic's error object as JSON."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    members: dict[str, object] = {"type": kind, "message": error_text(error)}
    if error.code is not None:
        members["details"] = {"error_code": error.code}
    return msgspec.json.encode({"type": "error", "error": members, "request_id": request_id})


def ollama_error(error: ApiError, request_id: str | None = None) -> bytes:
    """Ollama's error object as JSON."""
    return msgspec.json.encode({"error": error_text(error)})


def llama_cpp_error(error: ApiError, request_id: str | None = None) -> bytes:
    """llama.cpp's error object as JSON."""
    kind = _LLAMA_CPP_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"error": {"code": error.status, "message": error_text(error), "type": kind}})


_SHAPES: Mapping[str, Callable[[ApiError, str | None], bytes]] = {
    "/v1/messages": anthropic_error,
    "/api": ollama_error,
    "/completion": llama_cpp_error,
    "/infill": llama_cpp_error,
}
"""Shapes by the beginning of the path, up to a slash."""


def asks_in_anthropics_way(scope: Mapping[str, Any]) -> bool:
    """Whether the request comes from a client of Anthropic's API."""
    return any(name == ANTHROPIC_VERSION for name, _ in scope.get("headers", ()))


def error_response(error: ApiError, scope: Mapping[str, Any]) -> Response:
    """The whole response to a request that failed before its first byte was sent."""
    path, request_id = scope.get("path", ""), scope.get("state", {}).get("request_id")
    shape = next((shape for at, shape in _SHAPES.items() if path == at or path.startswith(f"{at}/")), None)
    if shape is None and path.startswith("/v1/models") and asks_in_anthropics_way(scope):
        shape = anthropic_error
    body = shape(error, request_id) if shape else error_body(error)
    return Response(body, error.status, dict(error.headers), media_type="application/json")
