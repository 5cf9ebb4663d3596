"""Opens a bounded session with one MCP server. Imports the `mcp` package, so it is imported on first use only.

Whatever the package or the server does, requests go to the listed origin alone, and the bytes of all answers together
are bounded. The package takes a list of tools as a whole or not at all, so it gets a stand-in for each, and null for
one that is no JSON.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
from mcp import Client
from mcp.client import streamable_http
from mcp.client.streamable_http import streamable_http_client
from mcp.types import jsonrpc_message_adapter

logging.getLogger("mcp.client").setLevel(logging.CRITICAL)  # it would log what servers send; failures are logged here

CLOSE_S = 2.0
"""How long a server may take to end a session."""
LEAST_PIECE = 64
"""Bytes that any piece of an answer counts for: each costs time, however short it is."""
_PIECES_AT_ONCE = 128
"""Others get a turn after so many: what has arrived already is read without a pause."""


class BoundedTransport(httpx2.AsyncBaseTransport):
    """HTTP to one origin. Only the client that owns it mutates it.

    Attributes:
        is_exceeded: The server sent more bytes than allowed.
    """

    def __init__(self, url: str, max_bytes: int) -> None:
        self.is_exceeded = False
        self._inner = httpx2.AsyncHTTPTransport()
        self._origin = _origin(httpx2.URL(url))
        self._room = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request to the origin; refuse any other, and an answer that would grow when it is unpacked."""
        if _origin(request.url) != self._origin:
            raise httpx2.RequestError("redirected to another origin", request=request)
        if request.method == "DELETE":  # nothing else bounds it: it is sent after the time for the answer, too
            async with asyncio.timeout(CLOSE_S):
                response = await self._inner.handle_async_request(request)
                await response.aclose()  # unread: a server could send it a byte at a time
            return httpx2.Response(response.status_code)
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.RequestError("answered with an encoding that was not asked for", request=request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        body = _BoundedStream(response.stream, self)
        return httpx2.Response(
            response.status_code, headers=response.headers, stream=body, extensions=response.extensions
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._inner.aclose()

    def take(self, num_bytes: int) -> None:
        """Count bytes of an answer."""
        self._room -= num_bytes
        if self._room < 0:
            self.is_exceeded = True
            raise httpx2.ReadError("answered with too many bytes")


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, owner: BoundedTransport) -> None:
        self._inner = inner
        self._owner = owner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_pieces = 0
        async for data in self._inner:
            self._owner.take(max(len(data), LEAST_PIECE))
            yield data
            num_pieces += 1
            if num_pieces % _PIECES_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        await self._inner.aclose()


GIVEN = "weft/given"
"""In the `_meta` of a stand-in, what the server lists."""


_PIECES = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.S)
"""Strings, the last of which may have no end, and brackets: what takes one step each."""
_DEPTH = 4
"""Of a tool in a message: message, result, list, tool."""


class _Messages:
    """Takes the place of the package's parser, for which one value in a tool that it cannot read spoils the list."""

    def validate_json(self, content: str | bytes, *, by_name: bool) -> Any:
        """Parse a message, with a stand-in for every tool of a list, and null for a tool that is no JSON."""
        try:
            sent = msgspec.json.decode(content)
        except (ValueError, RecursionError):
            try:
                text = content if isinstance(content, str) else content.decode("utf-8", "replace")
                sent = msgspec.json.decode(_mended(text))
            except (ValueError, RecursionError):
                return jsonrpc_message_adapter.validate_json(content, by_name=by_name)  # it says what is wrong
        result = sent.get("result") if isinstance(sent, dict) else None
        if isinstance(result, dict) and isinstance(tools := result.get("tools"), list):
            result["tools"] = [
                {"name": "tool", "inputSchema": {"type": "object"}, "_meta": {GIVEN: tool}} for tool in tools
            ]
        return jsonrpc_message_adapter.validate_python(sent, by_name=by_name)


def _mended(text: str) -> str:
    """A message with null for what stands where tools stand and cannot be read."""
    kept, depth, start, end = list[str](), 0, 0, 0
    for found in _PIECES.finditer(text):
        if found[0] in "[{":
            depth += 1
            start = found.start() if depth == _DEPTH else start
        elif found[0] in "]}":
            if depth == _DEPTH and not _is_json(text[start : found.end()]):
                kept += [text[end:start], "null"]
                end = found.end()
            depth -= 1
    return "".join([*kept, text[end:]])


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


streamable_http.jsonrpc_message_adapter = _Messages()  # type: ignore[assignment,attr-defined]


@asynccontextmanager
async def open_client(
    url: str, headers: Mapping[str, str], transport: BoundedTransport, max_bytes: int
) -> AsyncIterator[Client]:
    """A client after its handshake with the server. It waits for ever: the caller bounds the time."""
    sent = {**headers, "accept-encoding": "identity"}
    async with (
        httpx2.AsyncClient(headers=sent, timeout=None, transport=transport, trust_env=False) as http_client,
        Client(streamable_http_client(url, http_client=http_client, max_sse_event_size=max_bytes)) as client,
    ):
        yield client


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port
