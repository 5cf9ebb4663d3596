"""Sends one request to the application inside this process, through the same routes and checks as any client's."""

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

from weft.server.http.auth import BATCH_TENANT


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    request_id: str
    body: bytes


async def call(app: ASGIApp, path: str, body: bytes, tenant: str) -> Reply:
    """POST a JSON body for a tenant. Cancelling it is a client that leaves."""
    asked, status, headers, parts = False, 500, {}, []

    async def receive() -> Message:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()  # nobody leaves
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {},
        BATCH_TENANT: tenant,
    }
    await app(scope, receive, send)
    return Reply(status, headers.get(b"x-request-id", b"").decode(), b"".join(parts))
