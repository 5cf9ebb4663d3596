"""An HTTP server whose answers are scripted, also answers that Weft would never send."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def event(**delta: str) -> bytes:
    """One event of a stream."""
    return f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode()


END = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


@dataclass
class Script:
    """What the server answers to POST, and what it was asked.

    Attributes:
        pieces: The body; a callable in between is called, which lets a test hold the answer back.
        models: Names, or whole entries of the list.
        refuse: Given a request's body, status and body of a refusal, or None.
    """

    pieces: list[bytes | Callable[[], object]] = field(default_factory=lambda: [event(content="Hi."), END])
    content_type: str = "text/event-stream; charset=utf-8"
    models: list[str | dict[str, Any]] = field(default_factory=lambda: ["a", "b"])
    refuse: Callable[[dict[str, Any]], tuple[int, bytes] | None] = lambda body: None
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    is_left: threading.Event = field(default_factory=threading.Event)
    url: str = ""


@contextlib.contextmanager
def serving(script: Script) -> Iterator[Script]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, status: int, content_type: str, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            script.headers.append(dict(self.headers))
            cards = [{"id": each} if isinstance(each, str) else each for each in script.models]
            body = json.dumps({"data": cards}).encode()
            is_known = self.path == "/v1/models"
            self._answer(200 if is_known else 404, "application/json", body if is_known else b"not here")

        def do_POST(self) -> None:
            script.headers.append(dict(self.headers))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.asked.append(body)
            if (refusal := script.refuse(body)) is not None:
                self._answer(refusal[0], "application/json", refusal[1])
                return
            self._answer(200, script.content_type)
            try:
                for piece in script.pieces:
                    if isinstance(piece, bytes):
                        self.wfile.write(piece)
                    else:
                        piece()
            except OSError:
                script.is_left.set()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
