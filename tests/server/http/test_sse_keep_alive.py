import asyncio
import functools
import json
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest
from starlette.types import Message

from weft.server.apis.openai.render import DONE
from weft.server.http import sse
from weft.server.http.context import with_early_headers
from weft.server.http.sse import EventStream, error_event
from weft.server.settings import Settings

PING = b": ping\n\n"


async def streamed(events: AsyncGenerator[bytes, None], sent: list[bytes], ping_s: float) -> None:
    """Send a stream."""

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    stream = EventStream(events, lambda: DONE, error_event, headers={}, ping_s=ping_s, close=lambda: None)
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


def read_stripped(chunks: list[bytes]) -> list[str]:
    """The events that `vllm bench serve` sees: each chunk without white space around it, split at blank lines.

    What follows the last blank line waits for more, unless it is an event with whole JSON.
    """
    rest, seen = "", []
    for chunk in chunks:
        *whole, rest = (rest + chunk.decode().strip()).split("\n\n")
        if rest.startswith("data: ") and is_whole(rest.removeprefix("data: ")):
            whole, rest = [*whole, rest], ""
        seen += [message.strip().removeprefix("data: ") for message in whole if not message.startswith(":")]
    return seen


def is_whole(text: str) -> bool:
    try:
        return text == "[DONE]" or bool(json.loads(text))
    except ValueError:
        return False


def test_a_client_that_strips_each_chunk_loses_nothing_after_comments() -> None:
    """The client stripped the blank line after a comment, joined the next event to it, and lost all events."""
    sent: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for number, num_pings in enumerate((2, 0, 1, 0)):
            while sent[-num_pings:] != [PING] * num_pings and num_pings:
                await asyncio.sleep(0.005)
            yield b'data: {"n": %d}\n\n' % number

    asyncio.run(streamed(events(), sent, ping_s=0.05))
    assert sent.count(PING) >= 3
    assert read_stripped(sent) == ['{"n": 0}', '{"n": 1}', '{"n": 2}', '{"n": 3}', "[DONE]"]


def test_silence_lasts_ping_s_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments came after up to twice the time, and proxies cut streams that are silent for 60 s."""
    now, slept, sent = 0.0, [], []

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds
        await asyncio.sleep(0)

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal now
        now += 30.0  # the first event comes late
        yield b"data: {}\n\n"
        while sent.count(PING) < 2:
            await asyncio.sleep(0)

    monkeypatch.setattr(sse, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(sse, "anyio", SimpleNamespace(sleep=sleep))
    asyncio.run(streamed(events(), sent, ping_s=Settings().sse_ping_s))
    assert slept[:2] == [50.0, 50.0]
    assert PING not in sent[:2]


@pytest.mark.parametrize("is_made", [False, True])
def test_a_client_that_leaves_a_stream_begun_in_time_ends_what_makes_it(is_made: bool) -> None:
    ended: list[str] = []
    has_ping, has_data = asyncio.Event(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: {}\n\n"
        await asyncio.sleep(60)

    async def make() -> EventStream:
        try:
            await has_ping.wait()
            if not is_made:
                has_data.set()
                await asyncio.sleep(60)
        finally:
            ended.append("making")
        close = functools.partial(ended.append, "stream")
        return EventStream(events(), lambda: DONE, error_event, headers={}, ping_s=60, close=close)

    async def send(message: Message) -> None:
        (has_ping if message.get("body") == PING else has_data if message.get("body") else asyncio.Event()).set()

    async def receive() -> Message:
        await has_data.wait()
        return {"type": "http.disconnect"}

    async def stream() -> None:
        response = await with_early_headers(make(), error_event, 0.01)
        await response({"type": "http", "method": "POST"}, receive, send)
        await asyncio.sleep(0)  # the task's turn to end
        assert ended == ["making", "stream"][: 1 + is_made]

    asyncio.run(stream())
