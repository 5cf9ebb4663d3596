"""Requests that are long for no good: others are served beside them, and their memory is given back."""

import json
import pathlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer

WORDS = "the quick brown fox jumps over the lazy dog and answers in tokens "


def rss_bytes(pid: int) -> int:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmRSS:")))


def post(server: LiveServer, path: str, content: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.base_url}{path}", content=content, headers=headers, timeout=TIMEOUT_S)


@pytest.fixture
def beside(live_server: LiveServer) -> Iterator[list[httpx.Response]]:
    """Somebody who asks for little, again and again, while the test runs; the answers."""
    answers: list[httpx.Response] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers.append(post(live_server, "/v1/completions", b'{"prompt": "Hi", "max_tokens": 1}'))

    asking = threading.Thread(target=ask)
    asking.start()
    yield answers
    is_over.set()
    asking.join()
    assert answers
    assert {answer.status_code for answer in answers} == {200}


def test_eight_long_texts_hold_nobody_up(live_server: LiveServer, beside: list[httpx.Response], is_long: bool) -> None:
    """Each was encoded in full: 26 s to refuse eight of them, 21 s for a short request, 7.5 GB at the end."""
    (pid,) = live_server.children("weft.server.app.process")
    text = WORDS * (150_000 if is_long else 45_000)
    body = json.dumps({"prompt": text, "max_tokens": 1}).encode()
    with ThreadPoolExecutor(8) as senders:
        replies = list(senders.map(lambda _: post(live_server, "/v1/completions", body), range(16)))
    assert {reply.status_code for reply in replies} == {400}
    assert {reply.json()["error"]["code"] for reply in replies} == {"context_length_exceeded"}
    assert all("at least" in reply.json()["error"]["message"] for reply in replies)
    assert len(beside) > 4  # it had its turn while they were looked at: twice, when it waited for most of them
    assert rss_bytes(pid) < 500 << 20


@pytest.mark.parametrize(
    ("path", "begin", "item", "end"),
    [
        ("/v1/chat/completions", b'{"messages": [', b'{"role": "user", "content": "x"},', b"{}]}"),
        ("/v1/completions", b'{"prompt": [1', b', ""', b"]}"),
        ("/v1/completions", b'{"prompt": [1', b", 1", b"]}"),
        ("/v1/chat/completions", b'{"messages": [], "x": [', b"[],", b"[]]}"),
        ("/v1/completions", b'{"logit_bias": {"', b" ", b'": "x"}}'),
        ("/v1/completions", b'{"guided_grammar": "::=', b"\\n", b'"}'),
    ],
)
def test_a_large_body_beside_others(
    live_server: LiveServer,
    beside: list[httpx.Response],
    is_long: bool,
    path: str,
    begin: bytes,
    item: bytes,
    end: bytes,
) -> None:
    """100,000 messages held up the streams of others for 2.5 seconds of computing, 1.2 MB of empty texts for 2.7."""
    (pid,) = live_server.children("weft.server.app.process")
    body = begin + item * ((30 if is_long else 4) * 1_000_000 // len(item)) + end
    reply = post(live_server, path, body)
    assert reply.status_code == 400
    assert len(reply.content) < 1000
    assert rss_bytes(pid) < 500 << 20
