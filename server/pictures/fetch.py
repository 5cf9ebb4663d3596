"""Fetches a picture from a host that the operator allows, and from nowhere else.

Each name is resolved once, and the connection goes to an address that was resolved, so that a name cannot mean another
address a moment later. An address that is not public is refused, wherever it comes from: private, loopback and
link-local ones, such as that of a cloud's metadata. Redirects are bounded, and each is checked like the first address.
One time bounds all of it, so that a host cannot trickle. HTTP/1.0 is spoken, whose answers end with the connection.
"""

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Collection, Sequence
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

from weft.server.errors import InvalidRequestError, UnsupportedValueError, shown
from weft.server.pictures.calls import MAX_FILE_BYTES

FETCH_S: Final = 15.0
MAX_REDIRECTS: Final = 3
_MAX_HEAD_BYTES: Final = 16 << 10
_NOT_PUBLIC: Final = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96", "fec0::/10")))
"""With IPv4 addresses inside, or of a site."""
_REDIRECTS: Final = (301, 302, 303, 307, 308)


async def fetch(url: str, hosts: Collection[str], at: str) -> bytes:
    """The content at an https: URL.

    Args:
        hosts: Those that may be asked: a name, with a port if it is not 443.
        at: The path of the URL in the body.

    Raises:
        UnsupportedValueError: A host is not among them, or its address is not public.
        InvalidRequestError: The host answers with no content, too much of it, or too late.
    """
    try:
        async with asyncio.timeout(FETCH_S):
            for _ in range(MAX_REDIRECTS + 1):
                place = _allowed(url, hosts, at)
                status, location, content = await _ask(place, at)
                if status == 200:
                    return content
                if status not in _REDIRECTS or not location:
                    raise _fault(at, f"its host answers with status {status}")
                url = urljoin(url, location)
    except TimeoutError:
        raise _fault(at, f"its host takes more than {FETCH_S:g} s") from None
    except (OSError, EOFError, ValueError) as error:  # of the address, of the connection, of TLS
        raise _fault(at, f"its host cannot be asked ({type(error).__name__})") from None
    raise _fault(at, f"its host redirects more than {MAX_REDIRECTS} times")


def _fault(at: str, fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"{at}: the picture cannot be fetched: {fault}", param=at)


def _allowed(url: str, hosts: Collection[str], at: str) -> SplitResult:
    place = urlsplit(url)
    host = f"{(place.hostname or '').lower()}:{place.port or 443}"
    allowed = {each.lower() if ":" in each else f"{each.lower()}:443" for each in hosts}
    if place.scheme != "https" or host not in allowed:
        bound = "pictures may be fetched over https from the hosts in image_hosts alone"
        raise UnsupportedValueError(f"{at}: {bound}, got {shown(url[:200])}", param=at)
    return place


async def _ask(place: SplitResult, at: str) -> tuple[int, str, bytes]:
    """Status, location, and the content of status 200."""
    name, port = place.hostname or "", place.port or 443
    address = await _resolved(name, port, at)
    reader, writer = await asyncio.open_connection(
        *address, ssl=ssl_context(), server_hostname=name, limit=_MAX_HEAD_BYTES
    )
    try:
        path = (place.path or "/") + (f"?{place.query}" if place.query else "")
        if not (path.isascii() and path.isprintable()) or " " in path:
            raise _fault(at, "its address holds what must be escaped")
        host = name if port == 443 else f"{name}:{port}"
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\nUser-Agent: weft\r\nAccept: image/*\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status = int(first.split()[1])
        content = await _content(reader, fields.get("content-length", ""), at) if status == 200 else b""
        return status, fields.get("location", ""), content
    except (asyncio.LimitOverrunError, IndexError, ValueError):
        raise _fault(at, "its host's answer is no HTTP") from None
    finally:
        writer.transport.abort()


async def _content(reader: asyncio.StreamReader, declared: str, at: str) -> bytes:
    """All that follows; refused as soon as it is too much."""
    content, length = bytearray(), int(declared) if declared.isdecimal() else None
    while (length is None or len(content) < length) and max(len(content), length or 0) <= MAX_FILE_BYTES:
        if not (data := await reader.read(64 << 10)):
            break
        content += data
    if max(len(content), length or 0) > MAX_FILE_BYTES:
        raise _fault(at, f"it must have at most {MAX_FILE_BYTES} bytes, got {length or 'more'}")
    if length is not None and len(content) < length:
        raise _fault(at, f"its host says {length} bytes, and sends {len(content)}")
    return bytes(content)


async def _resolved(name: str, port: int, at: str) -> tuple[str, int]:
    """The first address of a host; refused if any of them is not public."""
    found = await resolve(name, port)
    for address in found:
        if not is_public(address):
            raise UnsupportedValueError(f"{at}: the host {shown(name)} has an address that is not public", param=at)
    if not found:
        raise _fault(at, "its host has no address")
    return found[0], port


async def resolve(name: str, port: int) -> Sequence[str]:
    """All addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Whether everybody may reach it; not an IPv4 address inside of an IPv6 one."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None,))[0]
        if inner is not None or any(parsed in network for network in _NOT_PUBLIC):
            return False
    return parsed.is_global and not parsed.is_multicast


@functools.cache
def ssl_context() -> ssl.SSLContext:
    """The system's certificates, which take long to read."""
    return ssl.create_default_context()
