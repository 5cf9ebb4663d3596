"""An ASGI app that streams the time at which it sends, as a deployment class and under uvicorn: `stamps.py PORT`."""

import asyncio
import sys
import time
from typing import Any

NUM_STAMPS = 150
PAUSE_S = 0.01


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        return
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(NUM_STAMPS):
        await send({"type": "http.response.body", "body": b"data: %d\n\n" % time.monotonic_ns(), "more_body": True})
        await asyncio.sleep(PAUSE_S)
    await send({"type": "http.response.body", "body": b""})


class Stamps:
    """Becomes a deployment class as `WeftReplica` does."""

    async def __serve_build_asgi_app__(self) -> Any:
        return app


async def delays_s(port: int, path: str = "/") -> list[float]:
    """Seconds from sending to receiving of each chunk of one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" % path.encode())
    delays = []
    async for line in reader:
        if line.startswith(b"data: "):
            delays.append((time.monotonic_ns() - int(line[6:])) / 1e9)
    writer.close()
    return delays


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
