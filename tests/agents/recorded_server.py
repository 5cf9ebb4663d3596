"""The server process, which writes down every request and the status of its answer.

Started in place of `weft.server.app.process`. Bodies are kept in files beside the record, for whoever looks into a
failure.
"""

import json
import os
import pathlib
import sys
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.agents.script import FOLDER
from weft.server.app import process


class Recorder:
    """Passes everything through untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._folder = pathlib.Path(os.environ[FOLDER])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ("/ready", "/health"):
            return await self._app(scope, receive, send)
        asked, answered = bytearray(), bytearray()
        line: dict[str, object] = {"method": scope["method"], "path": scope["path"], "status": None}

        async def record_receive() -> Message:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def record_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                line["status"] = message["status"]
            answered.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, record_receive, record_send)
        finally:
            self._note(line, bytes(asked), bytes(answered))

    def _note(self, line: dict[str, object], asked: bytes, answered: bytes) -> None:
        bodies = self._folder / "bodies"
        number = sum(1 for _ in bodies.glob("*.request"))
        (bodies / f"{number:03d}.request").write_bytes(asked)
        (bodies / f"{number:03d}.answer").write_bytes(answered)
        status = line["status"]
        if not isinstance(status, int) or status >= 400 or b"event: error" in answered:
            line["error"] = answered[-1000:].decode(errors="replace")
        with (self._folder / "http.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")


class RecordedServer(process.HttpServer):
    """uvicorn around the recorder."""

    def __init__(self, app: ASGIApp, connections: process.Connections, on_started: Callable[[], None]) -> None:
        super().__init__(Recorder(app), connections, on_started)


if __name__ == "__main__":
    process.HttpServer = RecordedServer  # type: ignore[misc]
    sys.exit(process.main(pathlib.Path(sys.argv[1]), int(sys.argv[2])))
