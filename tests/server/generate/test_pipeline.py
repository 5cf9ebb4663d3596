"""Clients that leave, and order in time: against a real socket."""

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from weft.server.http.limits import LONG_SIZE

TIMEOUT_S = 60.0
"""Of what is waited for; only a failure takes so long."""


def wait_for(condition: Callable[[], bool]) -> bool:
    end_time = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_time:
        if condition():
            return True
        time.sleep(0.005)
    return False


def send(base_url: str, path: str, body: Any) -> socket.socket:
    host, port = base_url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + content)
    return connection


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": ["a", "b"], "n": 2},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_requests_at_once(site: Any, path: str, stream: bool) -> None:
    site.engine.may_go_on = lambda num_read: num_read == 0  # after its first token it is silent
    with site.live() as base_url:
        connection = send(base_url, path, {**BODIES[path], "stream": stream})
        assert wait_for(lambda: bool(site.engine.asked) and site.engine.asked[0].generation.num_read > 0)
        connection.close()
        assert wait_for(lambda: all(asked.generation.closed.is_set() for asked in site.engine.asked))
        assert wait_for(lambda: site.app.state.lifecycle.num_active == 0)


def test_long_text_of_clients_that_have_left_is_not_encoded(site: Any) -> None:
    """It was encoded in full after its sender had gone, and everybody else's long text waited for it."""
    encoded, may_end = [], threading.Event()

    def encode(text: str, *_: object) -> list[int]:
        encoded.append(text[0])
        assert may_end.wait(TIMEOUT_S)
        return [1]

    site.tokenizer.encode = encode
    with site.live() as base_url:
        senders = {char: send(base_url, "/v1/completions", {"prompt": char * LONG_SIZE}) for char in "ab"}
        assert wait_for(lambda: len(encoded) == 2)
        senders |= {char: send(base_url, "/v1/completions", {"prompt": char * LONG_SIZE}) for char in "cd"}
        lifecycle = site.app.state.lifecycle
        assert wait_for(lambda: lifecycle.num_active == 4)
        senders["c"].close()
        assert wait_for(lambda: lifecycle.num_active == 3)
        may_end.set()
        assert wait_for(lambda: lifecycle.num_active == 0)
        for sender in senders.values():
            sender.close()
    assert sorted(encoded) == ["a", "b", "d"]


def test_deltas_arrive_as_they_are_made(site: Any) -> None:
    """No token is made before the client has seen the one before it."""
    seen: list[str] = []
    site.engine.answers, site.engine.may_go_on = ["abc"], lambda num_read: num_read <= len(seen)
    with site.live() as base_url, httpx.Client(base_url=base_url, timeout=TIMEOUT_S) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                seen += [char for char in "abc" if f'"content":"{char}"' in line]
    assert seen == ["a", "b", "c"]


def test_the_connection_serves_again_after_a_stream(site: Any) -> None:
    with site.live() as base_url, httpx.Client(base_url=base_url, timeout=TIMEOUT_S) as client:
        for _ in range(3):
            response = client.post("/v1/completions", json={"prompt": "a", "stream": True})
            assert response.text.endswith("data: [DONE]\n\n")
        assert len(site.engine.asked) == 3


@pytest.mark.parametrize(
    ("body", "timeout", "expected_s"),
    [
        ({}, "600", 600),
        ({}, "2.5", 2.5),
        ({"stream": True}, "600", None),  # keep-alive comments come sooner
        ({"stream": True}, "5", 5),
        ({}, "NOT_GIVEN", None),
        ({}, "inf", None),
        ({}, "-1", None),
    ],
)
def test_the_clients_timeout_is_the_deadline(site: Any, body: Any, timeout: str, expected_s: float | None) -> None:
    before = time.monotonic()
    site.call("POST", "/v1/completions", json={"prompt": "a", **body}, headers={"x-stainless-read-timeout": timeout})
    deadline = site.engine.asked[0].deadline
    if expected_s is None:
        assert deadline is None
    else:
        assert before + expected_s <= deadline <= time.monotonic() + expected_s
