"""MCP servers on loopback: a real one of the `mcp` package, and bad ones, which are a few lines of ASGI."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations


def new_server(name: str) -> MCPServer:
    """A server without tools, which leaves the log as it is."""
    handlers = logging.getLogger().handlers[:]
    server = MCPServer(name)
    logging.getLogger().handlers[:] = handlers  # it adds one of its own
    return server


class RealServer:
    """A server with tools, which answers while it may.

    It notes the headers that it was sent, and whether a slow call was cancelled.
    """

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        self.calls: list[str] = []
        self.was_cancelled = threading.Event()
        self.has_begun = threading.Event()
        self.may_answer = threading.Event()
        self.mcp = new_server("tools for tests")
        self.mcp.tool(annotations=ToolAnnotations(read_only_hint=True))(self.add)
        for tool in (self.echo, self.slow, self.failing, self.huge):
            self.mcp.tool()(tool)

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.calls.append("add")
        return a + b

    def echo(self, text: str) -> str:
        """Say it again."""
        self.calls.append("echo")
        return text

    async def slow(self) -> str:
        """Take a minute."""
        self.has_begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        return "late"

    def failing(self) -> str:
        """Fail."""
        raise ValueError("no luck")

    def huge(self) -> str:
        """Say much."""
        return "x" * 300_000

    def app(self) -> Any:
        inner = self.mcp.streamable_http_app()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
                while not self.may_answer.is_set():
                    await asyncio.sleep(0.01)
            await inner(scope, receive, send)

        return app


async def garbage(scope: Any, receive: Any, send: Any) -> None:
    """Answers everything with JSON that is not MCP."""
    if scope["type"] == "http":
        head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
        await send(head)
        await send({"type": "http.response.body", "body": b'{"hello": ['})


async def hanging(scope: Any, receive: Any, send: Any) -> None:
    """Never answers."""
    if scope["type"] == "http":
        while (await receive())["type"] != "http.disconnect":
            pass


@contextlib.contextmanager
def serve(app: Any) -> Iterator[str]:
    """The app behind a real socket; yields the URL of its MCP endpoint."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def listing(tools: Any, replaced: Mapping[bytes, bytes] | None = None, *, is_stream: bool = False) -> Any:
    """A server that lists these tools, whatever they are, and says hello to all who call one.

    Args:
        replaced: Bytes of its answers -> what it sends in their place.
        is_stream: It answers with events.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", scope["method"] == "POST"
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        asked = json.loads(body) if body else {}
        told: dict[str, Any] = {
            "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                           "serverInfo": {"name": "raw", "version": "1"}},
            "tools/list": {"tools": tools},
            "tools/call": {"content": [{"type": "text", "text": "hello"}]},
        }  # fmt: skip
        answer = {"jsonrpc": "2.0", "id": asked.get("id")}
        if result := told.get(asked.get("method", "")):
            answer["result"] = result
        else:
            answer["error"] = {"code": -32601, "message": "no such method"}
        status, data = (200, json.dumps(answer).encode()) if "id" in asked else (202 if body else 405, b"")
        for old, new in (replaced or {}).items():
            data = data.replace(old, new)
        data = b"event: message\ndata: " + data + b"\n\n" if is_stream and data else data
        kind = b"text/event-stream" if is_stream else b"application/json"
        headers = [(b"content-type", kind), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    return app
