import gzip
import socket
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.server.cli.scripted_server import END, Script, event
from weft.server.cli import chat_client
from weft.server.cli.chat_client import ChatClient, ChatDelta, ChatError, api_root

BODY = {"model": "a", "messages": []}


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/v1/", "http://h:8000/v1"),
        ("localhost:8000", "http://localhost:8000/v1"),
        ("https://h/api", "https://h/api/v1"),
        ("https://h/v1beta/openai", "https://h/v1beta/openai"),
    ],
)
def test_a_url_is_taken_with_or_without_its_version(url: str, root: str) -> None:
    assert api_root(url) == root


def test_models_and_the_key_that_is_sent(script: Script) -> None:
    script.models = [{"id": "ears", "input_modalities": ["audio"]}, "a", "b\x1b[2J"]
    assert ChatClient(script.url, "schlüssel").models() == ["a", "b[2J"]
    assert script.headers[0]["Authorization"].encode("latin-1").decode() == "Bearer schlüssel"
    ChatClient(script.url, None).models()
    assert "Authorization" not in script.headers[1]


def test_a_stream_becomes_deltas_without_control_characters(script: Script) -> None:
    script.pieces = [
        b": keep-alive\r\n\r\n",
        event(reasoning_content="Hm\x1b]0;title\x07"),
        event(reasoning="m")[:-1] + b"\r\n",
        b'data: {"choices": [{"delta": {"content": "x\xe2\x80\xa8\\u001b[1A',  # a line separator inside of JSON
        b'y"}}]}\n\n',
        b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n',
        b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}\n\ndata: [DONE]\n\n',
    ]
    assert list(ChatClient(script.url, None).stream(BODY)) == [
        ChatDelta(reasoning="Hm]0;title"),
        ChatDelta(reasoning="m"),
        ChatDelta(content="x\u2028[1Ay"),
        ChatDelta(finish_reason="length"),
        ChatDelta(num_tokens=4),
    ]
    assert script.asked == [BODY | {"stream": True, "stream_options": {"include_usage": True}}]


def test_a_server_without_stream_options_is_asked_again(script: Script) -> None:
    script.refuse = lambda body: (400, b"unknown field: stream_options") if "stream_options" in body else None
    assert [delta.content for delta in ChatClient(script.url, None).stream(BODY)] == ["Hi.", ""]
    assert [sorted(body) for body in script.asked] == [
        ["messages", "model", "stream", "stream_options"],
        ["messages", "model", "stream"],
    ]


def test_a_server_that_does_not_stream_is_understood(script: Script) -> None:
    script.content_type = "application/json"
    script.pieces = [b'{"choices": [{"message": {"content": "All."}, "finish_reason": "stop"}]}']
    (delta,) = ChatClient(script.url, None).stream(BODY)
    assert (delta.content, delta.finish_reason) == ("All.", "stop")


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error": {"message": "too \\u001b[31mlong", "code": null}}', "400: too [31mlong"),
        (401, b'{"error": "no key"}', "401: no key"),
        (502, b"<html>", "502: <html>"),
        (500, b"", "500: Internal Server Error"),
    ],
)
def test_a_refusal_says_why(script: Script, status: int, body: bytes, message: str) -> None:
    script.refuse = lambda _: (status, body)
    with pytest.raises(ChatError) as caught:
        list(ChatClient(script.url, None).stream(BODY))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (b'data: {"error": {"message": "the engine died"}}\n\n', "the engine died"),
        (b"", "the connection ended before the answer did"),
        (b"data: {'choices'}\n\n", "does not answer as OpenAI's API does"),
        (b'data: {"choices": [{"delta": {"content": 7}}]}\n\n', "does not answer as OpenAI's API does"),
    ],
)
def test_a_stream_that_breaks_off_is_a_fault_after_what_came(script: Script, last: bytes, message: str) -> None:
    script.pieces = [event(content="Well"), last]
    stream = ChatClient(script.url, None).stream(BODY)
    assert next(stream).content == "Well"
    with pytest.raises(ChatError, match=message):
        list(stream)


def test_no_done_is_needed_after_a_finish_reason(script: Script) -> None:
    script.pieces = [event(content="Hi."), END.partition(b"data: [DONE]")[0]]
    assert len(list(ChatClient(script.url, None).stream(BODY))) == 2


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(
        ChatError,
        match=f"^cannot reach {url}/v1: nobody listens there: start `weft serve`, or name another place with --url$",
    ):
        ChatClient(url, None).models()


@pytest.mark.parametrize("url", ["http://h:port", "ftp://h"])
def test_what_is_no_url_is_a_fault(url: str) -> None:
    with pytest.raises(ChatError, match=f"^{url}/v1: "):
        ChatClient(url, None).models()


def test_a_proxy_is_not_asked_for_this_machine(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert ChatClient(script.url, None).models() == ["a", "b"]


class Sent:
    """A transport whose server answers everything alike."""

    def __init__(self, pieces: Callable[[], Iterator[bytes]], status: int = 200, **headers: str) -> None:
        self.pieces, self.status, self.headers = pieces, status, {k.replace("_", "-"): v for k, v in headers.items()}
        self.num_bytes = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == "identity"

        def counted() -> Iterator[bytes]:
            for piece in self.pieces():
                self.num_bytes += len(piece)
                yield piece

        return httpx.Response(self.status, content=counted(), headers=self.headers)


def client_of(sent: Sent) -> ChatClient:
    client = ChatClient("http://h", None)
    client._http = httpx.Client(transport=httpx.MockTransport(sent), headers=client._http.headers)
    return client


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream", "text/html"])
@pytest.mark.parametrize("piece", [b"x" * 100_000, b"data: " + b"x" * 100_000 + b"\n"])
@pytest.mark.parametrize("status", [200, 500])
def test_a_server_that_does_not_end_is_left(
    monkeypatch: pytest.MonkeyPatch, content_type: str, piece: bytes, status: int
) -> None:
    monkeypatch.setattr(chat_client, "MAX_BYTES", 1_000_000)
    sent = Sent(lambda: iter(lambda: piece, None), status, content_type=content_type)
    with pytest.raises(ChatError, match="sends more than 1000000 bytes at once"):
        list(client_of(sent).stream(BODY))
    with pytest.raises(ChatError, match="sends more than 1000000 bytes at once"):
        client_of(sent).models()
    assert sent.num_bytes < 3_000_000


def test_a_long_answer_in_short_events_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_client, "MAX_BYTES", 1000)
    sent = Sent(lambda: iter([event(content="Hi.")] * 500 + [END]), content_type="text/event-stream")
    assert len(list(client_of(sent).stream(BODY))) == 501


def test_what_was_packed_unasked_is_not_unpacked() -> None:
    for encoding in ("gzip", "deflate", "br", "zstd"):
        sent = Sent(lambda: iter([gzip.compress(bytes(1 << 20))]), content_encoding=encoding)
        for ask in (client_of(sent).models, lambda: list(client_of(sent).stream(BODY))):  # noqa: B023
            with pytest.raises(ChatError, match="an encoding that was not asked for"):
                ask()


def test_the_list_of_models_comes_in_time_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_client, "_CONNECT_S", 0.1)

    def slow() -> Iterator[bytes]:
        while True:
            time.sleep(0.02)
            yield b" "

    with pytest.raises(ChatError, match="does not answer in time"):
        client_of(Sent(slow)).models()
