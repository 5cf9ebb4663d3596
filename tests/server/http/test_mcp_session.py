"""The end of a session with an MCP server that sends a byte at a time."""

import asyncio
import contextlib

import httpx2
import pytest

from weft.server.http import mcp_session as session
from weft.server.http.mcp_session import BoundedTransport

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n"
MOST = 1000
"""Bytes after which the server gives up: more than fit into the time, and without a bound the test ends, too."""


async def end_session(head: bytes) -> httpx2.Response:
    """The answer to the end of a session."""
    dripping: list[asyncio.Task[None] | None] = []

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dripping.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        with contextlib.suppress(ConnectionError):
            for _ in range(MOST):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.005)
        writer.close()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
        transport = BoundedTransport(url, 10 * MOST)
        try:
            async with httpx2.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
                return await client.delete(url)
        finally:
            await asyncio.gather(*(task for task in dripping if task))


def test_a_dripping_server_does_not_hold_up_the_end_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    response = asyncio.run(end_session(HEAD))
    assert (response.status_code, response.content) == (200, b"")
    monkeypatch.setattr(session, "CLOSE_S", 0.1)
    with pytest.raises(TimeoutError):
        asyncio.run(end_session(HEAD[:20]))
