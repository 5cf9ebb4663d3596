"""Errors have the shape of the API that was asked, wherever in the server they arise."""

import json
from typing import Any

import pytest

from weft.server.errors import BodyTooLargeError, InternalError, InvalidRequestError, QueueFullError, RouteError
from weft.server.http.middleware import error_response

STATE = {"request_id": "req_1"}


def body_of(error: Any, path: str, headers: Any = ()) -> Any:
    return json.loads(bytes(error_response(error, {"path": path, "headers": headers, "state": STATE}).body))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequestError("m"), "invalid_request_error"),
        (RouteError(404, "m", {}), "not_found_error"),
        (BodyTooLargeError("m"), "request_too_large"),
        (QueueFullError("m"), "overloaded_error"),
        (InternalError("m"), "api_error"),
    ],
)
def test_under_v1_messages_it_is_anthropics(error: Any, kind: str) -> None:
    members = {"type": kind, "message": "m"} | ({"details": {"error_code": error.code}} if error.code else {})
    expected = {"type": "error", "error": members, "request_id": "req_1"}
    assert body_of(error, "/v1/messages/count_tokens") == body_of(error, "/v1/messages") == expected
    assert body_of(error, "/v1/models/x", [(b"anthropic-version", b"2023-06-01")]) == expected


def test_other_habits() -> None:
    assert body_of(InvalidRequestError("m"), "/api/chat") == {"error": "m"}
    assert body_of(QueueFullError("m"), "/infill") == {
        "error": {"code": 503, "message": "m", "type": "unavailable_error"}
    }
    assert body_of(InvalidRequestError("m"), "/completions")["error"]["param"] is None
    assert body_of(InvalidRequestError("\ud800"), "/api/chat") == {"error": "?"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/batches"])
def test_middleware_answers_in_the_shape_of_the_route(make_site: Any, path: str) -> None:
    keys = {"api_key": ("secret",), "max_body_bytes": 10}
    reply = make_site(**keys).call("POST", path, json={})
    assert (reply.status, reply.json["error"]["type"]) == (401, "authentication_error")
    assert reply.json["request_id"] == reply.headers["x-request-id"]
    reply = make_site(**keys).call("POST", path, headers={"x-api-key": "secret"}, json={"prompt": "x" * 100})
    assert (reply.status, reply.json["error"]["type"]) == (413, "request_too_large")


def test_an_unknown_route_of_an_api_has_its_shape(make_site: Any) -> None:
    assert make_site().call("POST", "/api/push", json={}).json == {"error": "no such route: POST /api/push"}
