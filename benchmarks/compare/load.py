"""The load generator: streams over raw HTTP/1.1, and what was seen of them.

It shares the machine with the server, so it does little per event: it undoes the chunked transfer coding, notes when
events came, and parses none but those that say how many tokens were made. One connection per request. A reply that
is no stream of completions, breaks off, or lacks tokens fails the whole measurement: a figure over fewer requests
would be another figure.
"""

import asyncio
import json
import time
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import uvloop


class LoadError(Exception):
    """A request failed; says what the server answered."""


class StreamParser:
    """Bytes of one reply -> times of its events. Fed by one connection, in order.

    Attributes:
        event_times: When each event with output arrived, seconds of `time.perf_counter`.
        num_output_tokens: What the usage at the end says; None until it came.
        is_finished: The server has sent `[DONE]`.
    """

    def __init__(self) -> None:
        self.event_times: list[float] = []
        self.num_output_tokens: int | None = None
        self.is_finished = False
        self._buffer = b""  # what came and is not decoded: a head or a frame that is not yet whole
        self._text = b""  # decoded, and not yet a whole event
        self._has_head = False
        self._is_chunked = False

    def feed(self, data: bytes, now: float) -> None:
        """Take what arrived at `now`.

        Raises:
            LoadError: The answer is no stream of completions, or holds an error.
        """
        self._buffer += data
        if not self._has_head and not self._read_head():
            return
        self._text += self._decode()
        *events, self._text = self._text.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                self._read_event(event, now)

    def _read_head(self) -> bool:
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return False
        status, *lines = head.decode("latin-1").lower().split("\r\n")
        if status.split()[1] != "200":
            raise LoadError(f"the server answered {status}: {rest[:500].decode(errors='replace')}")
        self._is_chunked = any(line.startswith("transfer-encoding:") and "chunked" in line for line in lines)
        self._has_head, self._buffer = True, rest
        return True

    def _decode(self) -> bytes:
        """Undo the chunked transfer coding (RFC 9112, section 7.1), as far as frames are whole."""
        data, self._buffer = self._buffer, b""
        if not self._is_chunked:
            return data
        frames, at = [], 0
        while (line_end := data.find(b"\r\n", at)) >= 0:
            start = line_end + 2
            end = start + int(data[at:line_end].split(b";")[0], 16)
            if len(data) < end + 2:
                break
            frames.append(data[start:end])
            at = end + 2
        self._buffer = data[at:]
        return b"".join(frames)

    def _read_event(self, event: bytes, now: float) -> None:
        if event == b"data: [DONE]":
            self.is_finished = True
            return
        # JSON escapes quotes, so none of these can be part of a text; servers differ in the space after a colon.
        if b'"choices":' not in event:
            raise LoadError(f"the server sent {event[:500].decode(errors='replace')}")
        if b'"choices":[{' in event or b'"choices": [{' in event:
            self.event_times.append(now)
        if b'"usage":{' in event or b'"usage": {' in event:
            self.num_output_tokens = json.loads(event[len(b"data: ") :])["usage"]["completion_tokens"]


@dataclass(slots=True)
class Stream:
    """One request as the client saw it. Seconds of `time.perf_counter`."""

    sent_at: float
    parser: StreamParser = field(default_factory=StreamParser)

    @property
    def times(self) -> list[float]:
        """When its events with output arrived."""
        return self.parser.event_times

    @property
    def num_output_tokens(self) -> int:
        """How many tokens it got."""
        return self.parser.num_output_tokens or 0


class _Connection(asyncio.Protocol):
    """Hands what arrives to the parser of a stream, and ends with it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._transport: asyncio.BaseTransport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        parser = self._stream.parser
        try:
            parser.feed(data, time.perf_counter())
        except (LoadError, ValueError, KeyError, IndexError) as error:
            self._end(error)
        if parser.is_finished:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(LoadError(f"the stream broke off after {len(self._stream.times)} events: {exc or 'end of file'}"))

    def _end(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
        if self._transport is not None:
            self._transport.close()


async def _ask(url: urllib.parse.SplitResult, body: bytes, timeout_s: float) -> Stream:
    """Send one request to /v1/completions and read the stream to its end."""
    head = (
        f"POST {url.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    stream = Stream(time.perf_counter())
    loop = asyncio.get_running_loop()
    transport, connection = await loop.create_connection(
        lambda: _Connection(stream), url.hostname or "", url.port or 80
    )
    try:
        transport.write(head.encode() + body)
        await asyncio.wait_for(connection.done, timeout_s)
    except TimeoutError:
        raise LoadError(f"a stream had {len(stream.times)} events after {timeout_s:g} s") from None
    finally:
        transport.close()
    return stream


async def _ask_all(
    url: str, bodies: Iterable[bytes], concurrency: int, timeout_s: float, on_done: Callable[[], None]
) -> list[Stream]:
    """Send the requests in order, `concurrency` of them at a time."""
    target, waiting, streams = urllib.parse.urlsplit(url), iter(bodies), list[Stream]()

    async def work() -> None:
        for body in waiting:
            streams.append(await _ask(target, body, timeout_s))
            on_done()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return streams


def load(
    url: str,
    bodies: Iterable[bytes],
    concurrency: int,
    timeout_s: float = 600.0,
    on_done: Callable[[], None] = lambda: None,
) -> list[Stream]:
    """Send requests to a server and return what was seen.

    Args:
        url: Of the server, without path.
        bodies: JSON bodies for POST /v1/completions, streamed, with usage.
        concurrency: How many run at once.
        timeout_s: Most seconds for one request.
        on_done: Called after each.

    Raises:
        LoadError: One of them failed.
    """
    try:
        return uvloop.run(_ask_all(url, bodies, concurrency, timeout_s, on_done))
    except* (LoadError, OSError, ValueError, KeyError, IndexError) as group:
        raise LoadError(str(group.exceptions[0])) from None
