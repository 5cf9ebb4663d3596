"""Decides which web pages may use this server: checks `Host` and `Origin`, and answers CORS preflights.

Two attacks reach a server on a loopback address. A page can rebind its own name to that address (DNS rebinding), and
any page can send simple requests to this server's name. So on a loopback address without an API key, `Host` must be a
loopback name, `host` or one of `allowed_hosts`, and `Origin` one of these or of `cors_origins`. Otherwise the key and
the network decide who may ask, and `Host` is checked only if `allowed_hosts` is set. A request without these headers
does not come from a browser. A preflight needs no key, since browsers send none with it.
"""

import ipaddress
import re
import socket

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.server.errors import OriginError
from weft.server.http.error_shapes import error_response
from weft.server.http.middleware import HttpMiddleware
from weft.server.settings import Settings

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
