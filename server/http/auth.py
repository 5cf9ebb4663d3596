"""The API key check, before anything of a request is read. Without configured keys everybody may ask."""

import hmac
from collections.abc import Sequence, Set

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.server.errors import AuthenticationError, error_response

OPEN_PATHS = frozenset({"/health", "/ready"})
METRICS_PATH = "/metrics"


class AuthMiddleware:
    """Answers 401 to a request without a known key; notes the key of the others in the request's state."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], *, open_paths: Set[str], guard_metrics: bool) -> None:
        """Guard every path but these and those for probes; /metrics only if asked to."""
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = OPEN_PATHS | open_paths | (frozenset() if guard_metrics else {METRICS_PATH})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through or refuse it."""
        if scope["type"] != "http" or not self._keys or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            message = "an API key is required: send the header Authorization: Bearer KEY"
        elif not self._is_known(key):
            message = "the API key is not valid"
        else:
            scope.setdefault("state", {})["api_key"] = key
            await self._app(scope, receive, send)
            return
        await error_response(AuthenticationError(message))(scope, receive, send)

    def _is_known(self, given: str) -> bool:
        """Compare with every key, each in constant time: the time taken tells nothing about the keys."""
        given_bytes = given.encode("latin-1")  # the bytes as they came
        return any([hmac.compare_digest(given_bytes, key) for key in self._keys])
