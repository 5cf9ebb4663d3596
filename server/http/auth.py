"""Decides who may use this server: checks the API key, and the web page that asks.

The key is checked before anything else of a request is read. Without configured keys everybody may ask. What manages
models wants an admin key instead, and without a configured one nobody may.

Two attacks by web pages reach a server on a loopback address. A page can rebind its own name to that address (DNS
rebinding), and any page can send simple requests to this server's name. So on a loopback address without an API key,
`Host` must be a loopback name, `host` or one of `allowed_hosts`, and `Origin` one of these or of `cors_origins`.
Otherwise the key and the network decide who may ask, and `Host` is checked only if `allowed_hosts` is set. A request
without these headers does not come from a browser. A preflight of CORS is answered here; it needs no key, since
browsers send none with it.
"""

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Sequence, Set

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.server.errors import AdminKeyError, AuthenticationError, OriginError
from weft.server.http.middleware import METRICS_PATH, OPEN_PATHS, HttpMiddleware, error_response
from weft.server.settings import Settings


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
        self, app: ASGIApp, keys: Sequence[str], *, admin_keys: Sequence[str], open_paths: Set[str], guard_metrics: bool
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


ANY = "*"
EXPOSED = "x-request-id, x-ignored-params, retry-after"
METHODS = "GET, POST, PUT, PATCH, DELETE"
PREFLIGHT_AGE_S = 600

CONTAINERS_HOST = frozenset({"host.docker.internal", "host.containers.internal"})
"""Names of this machine inside its containers. Nobody can own a name under `.internal`, so none can be rebound."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/?#\s]+)(?::\d*)?", re.IGNORECASE)


def host_name(host: str) -> str:
    """The name or address in a `Host` header, in lower case; empty if it is malformed."""
    match = _HOST.fullmatch(host)
    return match[1].lower().strip("[]").removesuffix(".") if match else ""


def is_loopback(name: str) -> bool:
    """Whether a name or an address means this machine, without asking a name server."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listens_on_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    name = host.lower()
    if not is_loopback(name):
        try:
            name = str(socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])
        except OSError:
            return False
    return is_loopback(name)


class OriginMiddleware(HttpMiddleware):
    """Refuses requests from other web pages, and tells browsers which pages may read the answers."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        super().__init__(app)
        self._is_guarded = not settings.api_key and listens_on_loopback(settings.host)
        self._checks_host = (self._is_guarded or bool(settings.allowed_hosts)) and ANY not in settings.allowed_hosts
        self._hosts = {host_name(name) or name for name in (settings.host.lower(), *settings.allowed_hosts)}
        self._cors_origins = frozenset(settings.cors_origins)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, answer a preflight, or let the request through."""
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if self._cors_origins:
            send = self._with_cors(send, origin)
        if error := self._refusal(headers.getlist("host"), origin):
            await error_response(error, scope)(scope, receive, send)
        elif self._is_preflight(scope, headers):
            await Response(status_code=204, headers=self._preflight(headers))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, hosts: list[str], origin: str | None) -> OriginError | None:
        if self._checks_host:
            for host in hosts:
                if not self._is_known(host_name(host)):
                    return OriginError(f"host {host[:200]!r} is not served here; the setting allowed_hosts adds names")
        if not self._is_guarded or origin is None or self._may_read(origin):
            return None
        page = _page_host(origin)
        if page and (self._is_known(page) or page in map(host_name, hosts)):
            return None
        return OriginError(f"origin {origin[:200]!r} may not ask; the setting cors_origins allows web pages")

    def _is_known(self, name: str) -> bool:
        return is_loopback(name) or (bool(name) and (name in self._hosts or name in CONTAINERS_HOST))

    def _may_read(self, origin: str | None) -> bool:
        """Whether `cors_origins` has the origin; never without one."""
        return origin is not None and not self._cors_origins.isdisjoint((origin, ANY))

    def _is_preflight(self, scope: Scope, headers: Headers) -> bool:
        is_asked = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        return is_asked and self._may_read(headers.get("origin"))

    def _preflight(self, headers: Headers) -> dict[str, str]:
        answer = {"access-control-allow-methods": METHODS, "access-control-max-age": str(PREFLIGHT_AGE_S)}
        if wanted := headers.get("access-control-request-headers"):
            answer["access-control-allow-headers"] = wanted
        if "access-control-request-private-network" in headers:
            answer["access-control-allow-private-network"] = "true"
        return answer

    def _with_cors(self, send: Send, origin: str | None) -> Send:
        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if ANY not in self._cors_origins:
                    headers.add_vary_header("Origin")
                if origin and self._may_read(origin):
                    headers["access-control-allow-origin"] = ANY if ANY in self._cors_origins else origin
                    headers["access-control-expose-headers"] = EXPOSED
            await send(message)

        return send_with_cors


def _page_host(origin: str) -> str:
    """The host name in an origin; empty for `null` and for other schemes than http and https."""
    scheme, _, host = origin.partition("://")
    return host_name(host) if scheme in ("http", "https") else ""
