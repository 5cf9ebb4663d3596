import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import msgspec
import pytest

from tests.server.conftest import FakeEngine
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, CachePolicy
from weft.engine.wire.params import SamplingParams
from weft.server.models import other_clients as prefilling_client
from weft.server.models.other_clients import PrefillingClient, with_prefill
from weft.server.settings import Settings

URLS = ("http://a:1/", "https://b:2/prefill")
SETTINGS = Settings(
    prefill_urls=URLS, prefill_min_tokens=200, prefill_timeout_s=5, kv_role="decode", api_key=("first", "second")
)
PROMPT = list(range(300))


def request_for(token_ids: list[int], **changes: object) -> AddRequest:
    add = AddRequest(TokensInput(token_ids), SamplingParams(max_tokens=50), cache_salt="6:secret,")
    return msgspec.structs.replace(add, **changes)


Answer = Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]]


class Prefilling:
    """The client over a fake engine and fake prefill servers, which all answer alike."""

    def __init__(self, answer: Answer = lambda request: httpx.Response(200, json={})) -> None:
        self.engine = FakeEngine()
        self.sent: list[httpx.Request] = []
        client = with_prefill("name", self.engine, SETTINGS)
        assert isinstance(client, PrefillingClient)
        self.client = client

        async def note(request: httpx.Request) -> httpx.Response:
            self.sent.append(request)
            response = answer(request)
            if not isinstance(response, httpx.Response):
                response = await response
            if response.is_stream_consumed:  # as from a socket: nobody has read it yet
                response = httpx.Response(response.status_code, stream=httpx.ByteStream(response.content))
            return response

        client._http = httpx.AsyncClient(transport=httpx.MockTransport(note), headers=client._http.headers)

    def generate(self, token_ids: list[int], **changes: object) -> int:
        """Returns how many prompts prefill servers were sent. The engine gets the request in any case."""
        num_sent, num_got = len(self.sent), len(self.engine.asked)
        request = request_for(token_ids, **changes)
        asyncio.run(self.client.generate(request))
        assert [asked.request for asked in self.engine.asked[num_got:]] == [request]
        return len(self.sent) - num_sent


def test_a_long_prompt_is_computed_elsewhere_first() -> None:
    prefilling = Prefilling()
    assert prefilling.generate(PROMPT) == 1
    (sent,) = prefilling.sent
    assert str(sent.url) == "http://a:1/v1/completions"
    assert sent.headers["authorization"] == "Bearer first"
    assert json.loads(sent.content) == {
        "model": "name",
        "prompt": PROMPT,
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "cache_salt": "6:secret,"},
    }


def test_only_what_is_new_counts() -> None:
    prefilling = Prefilling()
    assert prefilling.generate(PROMPT[:199]) == 0
    assert prefilling.generate(PROMPT) == 0, "of 300 tokens 192 were seen"
    assert prefilling.generate(PROMPT, cache_salt="another") == 1
    assert prefilling.generate(PROMPT + PROMPT) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"caching": CachePolicy(is_stored=True)},  # another server sent it: two that name each other go in no circle
        {"caching": CachePolicy(is_used=False)},
        {"sampling_params": SamplingParams(prompt_logprobs=1)},
        {"adapter": "lora"},
    ],
)
def test_what_others_cannot_compute_stays_here(changes: dict[str, object]) -> None:
    assert Prefilling().generate(PROMPT, **changes) == 0


def test_a_server_that_fails_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        if request.url.host == "a":
            raise httpx.ConnectError("refused")
        return httpx.Response(200)

    prefilling, now = Prefilling(fail), time.monotonic()
    for number in range(3):
        assert prefilling.generate([number] * 300) == 1
    assert [request.url.host for request in prefilling.sent] == ["a", "b", "b"]
    monkeypatch.setattr(prefilling_client.time, "monotonic", lambda: now + 20)
    assert prefilling.generate([4] * 300) == 1
    assert prefilling.sent[-1].url.host == "a"


def test_a_server_that_is_full_is_asked_again_after_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers at once, and so it was the least busy one."""
    prefilling, now = Prefilling(lambda request: httpx.Response(503, text="queue_full")), time.monotonic()
    monkeypatch.setattr(prefilling_client.time, "monotonic", lambda: now)
    assert [prefilling.generate([number] * 300) for number in range(3)] == [1, 1, 0]
    now += 2
    assert prefilling.generate([4] * 300) == 1
    assert [request.url.host for request in prefilling.sent] == ["a", "b", "a"]
    assert caplog.messages == ["http://a:1 computes no prompt: 503 queue_full"]


@pytest.mark.parametrize(("timeout_s", "deadline_s", "num_resting"), [(0.1, 999, 1), (99, 0.1, 0)])
def test_a_slow_server_is_waited_for_in_bounds(timeout_s: float, deadline_s: float, num_resting: int) -> None:
    """A caller who cannot wait takes the server from nobody else."""

    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(99)
        return httpx.Response(200)

    prefilling = Prefilling(hang)
    prefilling.client._timeout_s = timeout_s
    assert prefilling.generate(PROMPT, deadline=time.monotonic() + deadline_s) == 1
    assert len(prefilling.client._resting) == num_resting


def test_without_a_role_or_urls_the_engine_is_asked_itself() -> None:
    engine = FakeEngine()
    for changes in ({"kv_role": "prefill"}, {"prefill_urls": ()}):
        assert with_prefill("name", engine, SETTINGS.model_copy(update=changes)) is engine


async def endless(piece: bytes, pause_s: float = 0.0) -> AsyncIterator[bytes]:
    while True:
        yield piece
        await asyncio.sleep(pause_s)


@pytest.mark.parametrize("status", [200, 307, 503])
@pytest.mark.parametrize(
    ("piece", "pause_s", "headers"),
    [
        (b"x" * (1 << 16), 0.0, {}),
        (b"x", 0.0, {}),  # each piece costs time
        (gzip.compress(bytes(1 << 20)), 0.0, {"content-encoding": "gzip"}),
        (b"\x78\x9c", 0.0, {"content-encoding": "deflate"}),
        (b"x", 0.05, {"content-encoding": "unheard-of"}),
    ],
)
def test_an_answer_is_read_in_bounds_and_never_unpacked(
    piece: bytes, pause_s: float, headers: dict[str, str], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It was read whole: one prompt took 1,754 MB of answers that never end, or of 800 kB that unpack to so much."""
    taken = 0

    async def counted() -> AsyncIterator[bytes]:
        nonlocal taken
        async for data in endless(piece, pause_s):
            taken += len(data)
            yield data

    location = {"location": "http://elsewhere/"}
    prefilling = Prefilling(lambda request: httpx.Response(status, content=counted(), headers={**headers, **location}))
    prefilling.client._timeout_s = 0.5
    assert prefilling.generate(PROMPT) == 1
    assert taken <= prefilling_client._MAX_ANSWER_BYTES + len(piece)
    assert prefilling.sent[0].headers["accept-encoding"] == "identity"
    assert list(prefilling.client._resting) == ["http://a:1"], "it is left alone"
    assert len(caplog.messages[0]) < 200


@pytest.mark.parametrize("words", [b"\x1b[2J" + b"one\nERROR two\r\n" * 5000, b"\xff\0" * 900, "\u202eolleh".encode()])
def test_what_a_server_says_takes_one_short_line_of_the_log(words: bytes, caplog: pytest.LogCaptureFixture) -> None:
    prefilling = Prefilling(lambda request: httpx.Response(500, content=words[:60_000]))
    assert prefilling.generate(PROMPT) == 1
    (line,) = caplog.messages
    assert len(line) < 300 and not set("\n\r\x1b\0\u202e") & set(line)
