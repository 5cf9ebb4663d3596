import asyncio
import functools
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from weft.server.errors import InvalidRequestError
from weft.server.http.sse import EventStream, TextEvent, encode_event, error_event


class Text(msgspec.Struct):
    text: str


class Named(msgspec.Struct):
    """The name is the client's choice."""

    name: str
    text: str


@pytest.mark.parametrize("text", ["a\r\nb", "a\u2028b\u2029c", "\x85", "é😀"])
def test_an_event_is_one_line_to_every_client(text: str) -> None:
    data = encode_event(Text(text))
    assert data.endswith(b"\n\n")
    line = data[:-2].decode()
    assert line.splitlines() == [line]
    assert msgspec.json.decode(line.removeprefix("data: "), type=Text).text == text


@pytest.mark.parametrize("text", ["", "a", '"\\\n', "a\u2028b\u2029c", "\x85", "é😀", "\0text\0"])
def test_an_event_of_which_only_the_text_is_encoded_is_the_same_event(text: str) -> None:
    text_event = TextEvent(functools.partial(Named, "\0text\0\x85"))
    assert text_event.fill(text) == encode_event(Named("\0text\0\x85", text))
    text_event = TextEvent(functools.partial(Named, "\0text\0"))
    assert text_event.fill(text) == encode_event(Named("\0text\0", text))


def test_text_is_not_escaped_without_need() -> None:
    assert encode_event(Text("é😀")) == 'data: {"text":"é😀"}\n\n'.encode()


TIMEOUT_S = 60.0
"""Of what is waited for; only a failure takes so long."""


def run(stream: EventStream, messages: list[Any], disconnect_s: float) -> list[bytes]:
    sent: list[bytes] = []

    async def receive() -> Any:
        await asyncio.sleep(disconnect_s)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        messages.append(message)
        sent.append(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": "/"}
    asyncio.run(asyncio.wait_for(stream(scope, receive, send), TIMEOUT_S))
    return sent


def end() -> bytes:
    return b"data: end\n\n"


def test_an_error_is_written_in_place_of_the_end() -> None:
    closed = False

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal closed
        try:
            yield b"data: 1\n\n"
            raise InvalidRequestError("m", param="p")
        finally:
            closed = True

    sent = run(EventStream(events(), end, error_event, headers={}, ping_s=0, close=lambda: None), [], TIMEOUT_S)
    first, error, rest = b"".join(sent).split(b"\n\n")
    assert first == b"data: 1"
    assert msgspec.json.decode(error.removeprefix(b"data: "))["error"]["param"] == "p"
    assert rest == b""
    assert closed


def test_silence_is_filled_with_comments() -> None:
    messages: list[Any] = []

    async def events() -> AsyncGenerator[bytes, None]:
        while len(messages) < 3:
            await asyncio.sleep(0.01)
        yield b"data: 1\n\n"

    closed: list[bool] = []
    stream = EventStream(events(), end, error_event, headers={}, ping_s=0.05, close=lambda: closed.append(True))
    sent = run(stream, messages, TIMEOUT_S)
    assert sent[:3] == [b"", b": ping\n\n", b": ping\n\n"]
    assert [data for data in sent[3:] if data != b": ping\n\n"] == [
        b":\n\ndata: 1\n\n",
        b"data: end\n\n",
    ]
    assert closed == [True]


def test_a_stream_whose_client_leaves_before_its_first_event_is_closed() -> None:
    """The generator has not begun then, so its own cleanup never runs."""

    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(TIMEOUT_S)
        yield b""

    closed: list[bool] = []
    run(EventStream(events(), end, error_event, headers={}, ping_s=0, close=lambda: closed.append(True)), [], 0)
    assert closed == [True]
