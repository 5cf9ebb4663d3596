"""Checks the API key before anything else of a request is read. Without configured keys everybody may ask.

What manages models wants an admin key instead, and without a configured one nobody may.
"""

import hashlib
import hmac
from collections.abc import Sequence, Set

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.server.errors import AdminKeyError, AuthenticationError
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


ADMIN_PATHS = frozenset({"/v1/models/load", "/v1/models/unload", "/v1/models/alias"}) | {
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}


class AuthMiddleware(HttpMiddleware):
    """Answers 401 without a known key; stores a known key in the request's state."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        *,
        admin_keys: Sequence[str],
        open_paths: Set[str],
        guard_metrics: bool,
    ) -> None:
        """Guard every path except `open_paths`, those of probes and, unless `guard_metrics`, /metrics."""
        super().__init__(app)
        self._keys, self._admin_keys = ([key.encode() for key in each] for each in (keys, admin_keys))
        self._open_paths = OPEN_PATHS | open_paths | (frozenset() if guard_metrics else {METRICS_PATH})

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or refuse it."""
        is_managing = scope["path"] in ADMIN_PATHS and scope["method"] == "POST"
        keys, what = (self._admin_keys, "admin") if is_managing else (self._keys, "API")
        if is_managing and not keys:
            nobody = AdminKeyError("models may be managed by nobody: set admin_key to allow it")
            await error_response(nobody, scope)(scope, receive, send)
            return
        if BATCH_TENANT in scope:
            scope.setdefault("state", {})["tenant"] = scope[BATCH_TENANT]
        elif keys and scope["path"] not in self._open_paths:
            headers = Headers(scope=scope)
            scheme, _, key = headers.get("authorization", "").partition(" ")
            key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
            message = None
            if not key:
                message = f"an {what} key is required: send the header Authorization: Bearer KEY, or x-api-key: KEY"
            elif not _is_known(key, keys):
                message = f"the {what} key is not valid"
            if message:
                await error_response(AuthenticationError(message), scope)(scope, receive, send)
                return
            scope.setdefault("state", {}).update(api_key=key, tenant=digest(key))
        await self._app(scope, receive, send)


def _is_known(given: str, keys: Sequence[bytes]) -> bool:
    """Compare with every key, each in constant time, so that the time reveals nothing about the keys."""
    given_bytes = given.encode("latin-1")  # the bytes of the header
    return any([hmac.compare_digest(given_bytes, key) for key in keys])
