"""Checks the API key before anything else of a request is read. Without configured keys everybody may ask."""

import hashlib
import hmac
from collections.abc import Sequence, Set

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.server.errors import AuthenticationError
from weft.server.http.error_shapes import error_response
from weft.server.http.middleware import METRICS_PATH, OPEN_PATHS, HttpMiddleware


def tenant_of(request: Request) -> str:
    """Whose request this is: a digest of its API key; empty if none is required."""
    tenant: str = getattr(request.state, "tenant", "")
    return tenant


def digest(name: str) -> str:
    """A name for a tenant that reveals nothing of its key."""
    return hashlib.blake2s(name.encode("utf-8", "replace"), digest_size=16).hexdigest()


BATCH_TENANT = "weft.batch_tenant"
"""Member of the scope of a request that a batch makes inside this process: whose batch it is. A server fills a scope by
itself, so no client can set it."""


def is_of_batch(request: Request) -> bool:
    """Whether a line of a batch asks, which is served only while nobody else is."""
    return BATCH_TENANT in request.scope


class AuthMiddleware(HttpMiddleware):
    """Answers 401 without a known key; stores a known key in the request's state."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], *, open_paths: Set[str], guard_metrics: bool) -> None:
        """Guard every path except `open_paths`, those of probes and, unless `guard_metrics`, /metrics."""
        super().__init__(app)
        self._keys = [key.encode() for key in keys]
        self._open_paths = OPEN_PATHS | open_paths | (frozenset() if guard_metrics else {METRICS_PATH})

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or refuse it."""
        if BATCH_TENANT in scope:
            scope.setdefault("state", {})["tenant"] = scope[BATCH_TENANT]
        elif self._keys and scope["path"] not in self._open_paths:
            headers = Headers(scope=scope)
            scheme, _, key = headers.get("authorization", "").partition(" ")
            key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
            message = None
            if not key:
                message = "an API key is required: send the header Authorization: Bearer KEY, or x-api-key: KEY"
            elif not self._is_known(key):
                message = "the API key is not valid"
            if message:
                await error_response(AuthenticationError(message), scope)(scope, receive, send)
                return
            scope.setdefault("state", {}).update(api_key=key, tenant=digest(key))
        await self._app(scope, receive, send)

    def _is_known(self, given: str) -> bool:
        """Compare with every key, each in constant time, so that the time reveals nothing about the keys."""
        given_bytes = given.encode("latin-1")  # the bytes of the header
        return any([hmac.compare_digest(given_bytes, key) for key in self._keys])
