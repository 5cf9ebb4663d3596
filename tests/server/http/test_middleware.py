import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest


def test_every_response_has_the_headers(site: Any) -> None:
    for reply in (site.chat(), site.chat(stream=True), site.chat(n=0), site.call("GET", "/nope")):
        assert reply.headers["x-request-id"].startswith("req_")
        assert int(reply.headers["openai-processing-ms"]) >= 0
        assert reply.headers["openai-model"] == "org/fake model"


def test_request_ids_are_new_unless_the_caller_has_one(site: Any) -> None:
    assert site.chat().headers["x-request-id"] != site.chat().headers["x-request-id"]
    assert site.call("GET", "/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("given", [b"a b", b"x" * 129, b"\xff", b'"'])
def test_an_odd_request_id_is_replaced(site: Any, given: bytes) -> None:
    reply = site.call("GET", "/version", headers={"x-request-id": given})
    assert reply.headers["x-request-id"].startswith("req_")


def test_a_model_name_that_is_no_header_is_escaped(make_site: Any) -> None:
    reply = make_site(served_model_name=("modèle\n",)).call("GET", "/version")
    assert reply.headers["openai-model"] == "mod%C3%A8le%0A"


def test_declared_length_over_the_limit(make_site: Any) -> None:
    reply = make_site(max_body_bytes=100).complete(prompt="x" * 100)
    assert reply.status == 413
    assert (reply.error["type"], reply.error["code"]) == ("invalid_request_error", "request_too_large")
    assert "100 bytes" in reply.error["message"]


def test_undeclared_length_over_the_limit(make_site: Any) -> None:
    num_sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_sent
        for _ in range(1000):
            num_sent += 1
            yield b"[" * 10

    site = make_site(max_body_bytes=100)
    reply = site.call("POST", "/v1/completions", content=body(), headers={"content-type": "application/json"})
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert num_sent <= 12


def test_a_body_of_just_the_limit_is_read(make_site: Any) -> None:
    content = b'{"prompt": "a"}'
    headers = {"content-type": "application/json"}
    site = make_site(max_body_bytes=len(content))
    assert site.call("POST", "/v1/completions", content=content, headers=headers).status == 200


def test_draining_refuses_what_is_new(site: Any) -> None:
    site.app.state.lifecycle.draining = True
    reply = site.chat()
    assert (reply.status, reply.error["code"]) == (503, "shutting_down")
    assert reply.headers["connection"] == "close"
    assert site.call("GET", "/ready").status == 503
    assert site.call("GET", "/health").status == 200
    assert site.call("GET", "/metrics").status == 200
    assert site.call("GET", "/stats").status == 200, "an open page, which asks twice a second, filled its console"


def test_requests_are_counted_until_their_last_byte(site: Any) -> None:
    lifecycle = site.app.state.lifecycle
    seen: list[int] = []
    ask = site.engine.generate

    async def generate(request: Any) -> Any:
        seen.append(lifecycle.num_active)
        return await ask(request)

    site.engine.generate = generate
    site.chat(stream=True)
    site.chat(n=0)
    assert seen == [1]
    assert lifecycle.num_active == 0
    assert asyncio.run(lifecycle.wait_idle(0.1))
