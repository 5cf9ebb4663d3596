"""The HTTP client of `weft chat`: lists models and streams an answer from any OpenAI-compatible URL.

Answers, names and error messages that it returns are free of control characters, if not said otherwise.
"""

import contextlib
import re
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass

import httpx
import msgspec

from weft.server.text.shield import strip_controls

_CONNECT_S = 10.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_BYTES = 16 << 20
"""Of the list of models, of an answer that is no stream, of an error, and of one event of a stream."""
_MAX_FAULT = 500
"""Characters shown of a response body that is no error object."""


class ChatError(Exception):
    """The server cannot be reached, or refused; the message is for the user."""


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What one event of a stream adds. num_tokens counts the whole answer; only the last event has it, if any."""

    reasoning: str = ""
    content: str = ""
    finish_reason: str | None = None
    num_tokens: int | None = None


class _Part(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _PartOfChoice(msgspec.Struct):
    delta: _Part | None = None
    message: _Part | None = None  # from a server that does not stream
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    """An event, a whole answer, an error object or the list of models; absent fields are None."""

    choices: list[_PartOfChoice] | None = None
    usage: dict[str, object] | None = None
    error: dict[str, object] | str | None = None
    data: list[dict[str, object]] | None = None


def api_root(url: str) -> str:
    """The URL before the routes: with a scheme, and with /v1 unless it names a version."""
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    return url if re.search(r"/v\d\w*(/|$)", url) else f"{url}/v1"


class ChatClient:
    """A client of one server; `url` is its root. Raises ChatError if the URL is malformed."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = api_root(url)
        try:
            host = httpx.URL(self.url).host
        except httpx.InvalidURL as error:
            raise ChatError(f"{self.url}: {error}") from None
        key = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        self._http = httpx.Client(
            headers={**key, b"Accept-Encoding": b"identity"},  # nothing grows when it is unpacked
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # on a CPU a long prompt takes minutes
            trust_env=host not in _LOOPBACK,  # no proxy leads to this machine
        )

    def models(self) -> list[str]:
        """Names of the listed models that may chat; `cards` says what is raised."""
        cards = (card for card in self.cards() if card.get("input_modalities") != ["audio"])
        return [strip_controls(str(card.get("id"))) for card in cards]

    def cards(self) -> list[dict[str, object]]:
        """The models that the server lists, as they come: control characters and all.

        Raises:
            ChatError: It refuses, or cannot be reached.
        """
        with self._faults(), self._http.stream("GET", f"{self.url}/models", timeout=_CONNECT_S) as response:
            data = _whole(response, time.monotonic() + _CONNECT_S)
            if not response.is_success:
                raise ChatError(_refusal(response, data))
            return msgspec.json.decode(data, type=_Body).data or []

    def stream(self, body: Mapping[str, object], *, has_usage: bool = True) -> Generator[ChatDelta, None, None]:
        """Request one answer and yield it as it arrives. Closing the iterator ends the request.

        Args:
            body: Of POST /chat/completions, without the fields for streaming.
            has_usage: Ask for the number of tokens. A server that refuses `stream_options` is asked again without.

        Raises:
            ChatError: The server refuses, or the stream breaks off.
        """
        request = {**body, "stream": True} | ({"stream_options": {"include_usage": True}} if has_usage else {})
        is_finished = False
        address = f"{self.url}/chat/completions"
        with self._faults(), self._http.stream("POST", address, json=request) as response:
            if not response.is_success:
                refusal = _whole(response)
                if not (has_usage and b"stream_options" in refusal):
                    raise ChatError(_refusal(response, refusal))
                yield from self.stream(body, has_usage=False)
                return
            for event in _events(response):
                if event == b"[DONE]":
                    return
                delta = _read(event)
                is_finished = is_finished or delta.finish_reason is not None
                yield delta
            if not is_finished:
                raise ChatError("the connection ended before the answer did")

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            fault = "nobody listens there: start `weft serve`" if "refused" in str(error) else str(error)
            raise ChatError(f"cannot reach {self.url}: {fault}, or name another place with --url") from None
        except httpx.HTTPError as error:
            raise ChatError(f"{self.url}: {str(error) or type(error).__name__}") from None
        except msgspec.DecodeError as error:
            raise ChatError(f"{self.url} does not answer as OpenAI's API does: {error}") from None


def _pieces(response: httpx.Response) -> Iterator[bytes]:
    """The body as it arrives. Raises ChatError if it is packed, which was not asked for."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise ChatError(f"{response.url} answers in an encoding that was not asked for")
    yield from response.iter_raw()


def _whole(response: httpx.Response, deadline: float | None = None) -> bytes:
    """The whole body. Raises ChatError if it is longer than the bound, or not there at the deadline."""
    data = bytearray()
    for piece in _pieces(response):
        data += piece
        _check(response, len(data))
        if deadline is not None and time.monotonic() > deadline:
            raise ChatError(f"{response.url} does not answer in time")
    return bytes(data)


def _check(response: httpx.Response, num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise ChatError(f"{response.url} sends more than {MAX_BYTES} bytes at once")


def _events(response: httpx.Response) -> Iterator[bytes]:
    """The data of each event. Lines end in LF or CRLF; httpx would also split at a U+2028 inside JSON."""
    if "event-stream" not in response.headers.get("content-type", ""):
        yield _whole(response)
        return
    pending, data = b"", list[bytes]()
    for piece in _pieces(response):
        *lines, pending = (pending + piece).split(b"\n")
        _check(response, len(pending) + sum(map(len, data)))
        for line in (line.rstrip(b"\r") for line in lines):
            if line.startswith(b"data:"):
                data.append(line[5:].strip())
            elif not line and data:
                yield b"\n".join(data)
                data = []


def _read(event: bytes) -> ChatDelta:
    chunk = msgspec.json.decode(event, type=_Body)
    if chunk.error:
        raise ChatError(_sentence(chunk.error))
    choice = chunk.choices[0] if chunk.choices else _PartOfChoice()
    part = choice.delta or choice.message or _Part()
    num_tokens = (chunk.usage or {}).get("completion_tokens")
    return ChatDelta(
        reasoning=strip_controls(part.reasoning_content or part.reasoning or ""),
        content=strip_controls(part.content or ""),
        finish_reason=choice.finish_reason,
        num_tokens=num_tokens if isinstance(num_tokens, int) else None,
    )


def _refusal(response: httpx.Response, data: bytes) -> str:
    """Status and reason of a response that is an error."""
    try:
        error = msgspec.json.decode(data, type=_Body).error
    except msgspec.DecodeError:
        error = None
    reason = _sentence(error) if error else strip_controls(data.decode("utf-8", "replace"))[:_MAX_FAULT].strip()
    return f"{response.status_code}: {reason or response.reason_phrase}"


def _sentence(error: dict[str, object] | str) -> str:
    return strip_controls(error if isinstance(error, str) else str(error.get("message") or error))
