import asyncio
from collections.abc import AsyncGenerator

from starlette.types import Message

from server.sse import EventStream


async def streamed(pauses_s: list[float], ping_s: float) -> bytes:
    """The body of a stream that waits before each of its events."""

    async def events() -> AsyncGenerator[bytes, None]:
        for pause_s in pauses_s:
            await asyncio.sleep(pause_s)
            yield b"data: {}\n\n"

    body = b""

    async def send(message: Message) -> None:
        nonlocal body
        body += message.get("body", b"")

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    stream = EventStream(events(), lambda: b"", headers={}, ping_s=ping_s, close=lambda: None)
    await stream({"type": "http", "method": "POST"}, receive, send)
    return body


def test_a_stream_that_flows_gets_no_comments() -> None:
    """One client's parser lost every event that followed a comment, so a comment in a busy stream is a risk."""
    assert b": ping" not in asyncio.run(streamed([0.02] * 30, ping_s=0.2))


def test_a_silent_stream_is_kept_alive() -> None:
    body = asyncio.run(streamed([0.0, 0.5], ping_s=0.1))
    assert 2 <= body.count(b": ping\n\n") <= 5
    assert body.endswith(b"data: [DONE]\n\n")
