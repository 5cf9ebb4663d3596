import json
from typing import Any

import pytest

from weft.engine.wire.messages import RejectReason
from weft.server.errors import (
    MAX_MESSAGE_CHARS,
    EngineDiedError,
    EngineLeftError,
    EngineUnavailableError,
    InvalidRequestError,
    as_api_error,
    error_body,
    rejection,
)

TABLE = [
    (rejection(RejectReason.INVALID, "m"), 400, "invalid_request_error", "invalid_value", {}),
    (
        rejection(RejectReason.CONTEXT_LENGTH, "m"),
        *(400, "invalid_request_error", "context_length_exceeded", {}),
    ),
    (rejection(RejectReason.QUEUE_FULL, "m"), 503, "server_overloaded", "queue_full", {"retry-after": "2"}),
    (
        rejection(RejectReason.POISON, "m"),
        *(400, "invalid_request_error", "poison_request", {"x-should-retry": "false"}),
    ),
    (EngineUnavailableError(), 503, "server_error", "engine_restarting", {"retry-after": "2"}),
    (EngineDiedError(), 503, "server_error", "engine_restarting", {"retry-after": "2"}),
    (EngineLeftError(), 503, "server_error", "shutting_down", {"connection": "close", "retry-after": "2"}),
    (ValueError("secret"), 500, "server_error", "internal_error", {}),
]


@pytest.mark.parametrize(("exc", "status", "type_", "code", "headers"), TABLE)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("stream", [False, True])
def test_failures_before_the_first_byte_are_statuses(
    site: Any, endpoint: str, stream: bool, exc: Exception, status: int, type_: str, code: str, headers: Any
) -> None:
    site.engine.refuse = exc
    reply = getattr(site, endpoint)(stream=stream)
    assert reply.status == status
    assert (reply.error["type"], reply.error["code"]) == (type_, code)
    assert {name: reply.headers.get(name) for name in headers} == headers
    assert reply.headers["x-request-id"]
    assert "secret" not in reply.text


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_a_failure_in_an_open_stream_is_an_event(site: Any, endpoint: str) -> None:
    site.engine.error, site.engine.error_after = EngineDiedError(), 2
    reply = getattr(site, endpoint)(stream=True)
    assert reply.status == 200
    *before, last = reply.events
    assert before
    assert all("error" not in event for event in before)
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "engine_restarting")
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert site.engine.asked[0].generation.closed.is_set()


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_a_failure_in_a_plain_answer_is_a_status(site: Any, endpoint: str) -> None:
    site.engine.error, site.engine.error_after = EngineDiedError(), 2
    reply = getattr(site, endpoint)()
    assert (reply.status, reply.error["code"]) == (503, "engine_restarting")
    assert site.engine.asked[0].generation.closed.is_set()


def test_an_unforeseen_failure_is_logged_and_says_nothing(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    site.engine.error, site.engine.error_after = RuntimeError("secret"), 2
    plain, stream = site.chat(), site.chat(stream=True)
    assert (plain.status, plain.error["code"]) == (500, "internal_error")
    assert stream.events[-1]["error"]["code"] == "internal_error"
    assert "secret" not in plain.text + stream.text
    assert caplog.text.count("RuntimeError: secret") == 2


def test_while_the_engine_is_away(site: Any) -> None:
    site.engine.info = None
    for reply in (site.chat(), site.complete(stream=True), site.call("POST", "/tokenize", json={"prompt": "a"})):
        assert (reply.status, reply.error["code"]) == (503, "engine_restarting")
        assert reply.headers["retry-after"] == "2"
    assert site.call("GET", "/v1/models").json["data"][0]["max_model_len"] is None


def test_an_api_error_is_its_own_answer() -> None:
    error = InvalidRequestError("m", param="p")
    assert as_api_error(error) is error


def test_a_message_has_a_bound() -> None:
    message = json.loads(error_body(InvalidRequestError("a" * 10_000)))["error"]["message"]
    assert message == "a" * MAX_MESSAGE_CHARS


def test_a_message_with_a_lone_surrogate_can_be_sent() -> None:
    assert json.loads(error_body(InvalidRequestError("\ud800")))["error"]["message"] == "?"
