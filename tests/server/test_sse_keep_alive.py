import asyncio
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest
from starlette.types import Message

from server import sse
from server.sse import EventStream

PING = b": ping\n\n"


async def streamed(events: AsyncGenerator[bytes, None], sent: list[bytes], ping_s: float) -> None:
    """Send a stream."""

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    stream = EventStream(events, lambda: b"", headers={}, ping_s=ping_s, close=lambda: None)
    await stream({"type": "http", "method": "POST"}, receive, send)


def test_a_stream_that_flows_gets_no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client's parser lost every event that followed a comment, so a comment in a busy stream is a risk."""
    now = 100.0
    monkeypatch.setattr(sse, "time", SimpleNamespace(monotonic=lambda: now))  # on which 20 ms are never more

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal now
        for _ in range(30):
            yield b"data: {}\n\n"
            await asyncio.sleep(0.02)
            now += 0.02

    sent: list[bytes] = []
    asyncio.run(streamed(events(), sent, ping_s=0.05))
    assert PING not in sent


def test_a_silent_stream_is_kept_alive_but_not_flooded() -> None:
    sent: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: {}\n\n"
        while sent.count(PING) < 3:
            await asyncio.sleep(0.01)
        yield b"data: {}\n\n"

    start_time = time.monotonic()
    asyncio.run(streamed(events(), sent, ping_s=0.1))
    assert sent.count(PING) <= (time.monotonic() - start_time) / 0.1
    assert sent[-1].endswith(b"data: [DONE]\n\n")
