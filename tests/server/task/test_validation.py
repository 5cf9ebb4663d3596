from typing import Any

import pytest

from weft.server.task.bodies import ChatCompletionBody, CompletionBody
from weft.server.task.schema import GenerationBody

JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "a"}
BODIES: dict[str, tuple[dict[str, Any], type[GenerationBody]]] = {
    "/v1/chat/completions": ({"messages": [USER]}, ChatCompletionBody),
    "/v1/completions": ({"prompt": "a"}, CompletionBody),
}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER, {"role": "user", "content": [{"type": "text", "text": 3}]}], "messages[1].content[0].text"),
        ([USER, {"role": "user", "content": 3}], "messages[1].content"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "robot", "content": "a"}], "messages[0].role"),
        (["a"], "messages[0]"),
        ("a", "messages"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": ""}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_the_path_to_the_fault(site: Any, messages: Any, param: str) -> None:
    reply = site.chat(messages=messages)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert reply.error["message"].startswith(param)
    assert reply.error["code"] in ("invalid_type", "invalid_value")


def test_text_that_has_no_utf8_form(site: Any) -> None:
    reply = site.call("POST", "/v1/completions", content=b'{"prompt": "\\ud800"}', headers=JSON)
    assert (reply.status, reply.error["param"]) == (400, "prompt")


def test_a_missing_field(site: Any) -> None:
    error = site.call("POST", "/v1/chat/completions", json={"model": "alias"}).error
    assert (error["message"], error["param"], error["code"]) == ("messages is required", "messages", "invalid_value")


@pytest.mark.parametrize(
    ("content", "headers", "told"),
    [
        (b"{", JSON, "not valid JSON"),
        (b"", JSON, "empty"),
        (b"[]", JSON, "the body"),
        (b"[" * 100_000, JSON, "nested too deeply"),
        (b'{"messages": "\xff"}', JSON, "not encoded in UTF-8"),
        (b'{"seed": ' + b"9" * 5000 + b"}", JSON, "too many digits"),
        (b"{}", {}, "Content-Type"),
        (b"{}", {"content-type": "text/plain"}, "Content-Type"),
    ],
)
def test_a_body_that_is_no_json(site: Any, content: bytes, headers: Any, told: str) -> None:
    reply = site.call("POST", "/v1/completions", content=content, headers=headers)
    assert reply.status == 400
    assert told in reply.error["message"]
    assert reply.error["param"] is None


def test_a_long_value_is_not_quoted_at_length(site: Any) -> None:
    assert len(site.chat(temperature="x" * 10_000).error["message"]) < 200
    assert len(site.chat(n=10**4000).error["message"]) < 200


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {"x" * 10_000: "x"}}, {"x" * 10_000: 1}, {"metadata": {"x" * 10_000: 1}}]
)
def test_a_long_name_is_not_quoted_at_length(make_site: Any, fields: Any) -> None:
    """It came back whole, and twice: in the message and as the path."""
    error = make_site(strict_params=True).chat(**fields).error
    assert "x" * 80 in error["param"]
    assert len(error["param"]) < 100
    assert len(error["message"]) < 300


@pytest.mark.parametrize("metadata", [{str(i): "a" for i in range(17)}, {"a" * 65: "a"}, {"a": "a" * 513}, {"a": 1}])
def test_metadata_has_limits(site: Any, metadata: Any) -> None:
    assert site.chat(metadata=metadata).error["param"].startswith("metadata")


@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_type_names_its_field_whichever_it_is(site: Any, path: str) -> None:
    """A value that no field takes: neither object, number, text, switch nor a list of anything but it."""
    body, model = BODIES[path]
    for name in model.model_fields:
        reply = site.call("POST", path, json={**body, name: [[{"odd": [None]}]]})
        assert reply.status == 400, name
        assert reply.error["type"] == "invalid_request_error"
        assert reply.error["param"].replace("[", ".").split(".")[0] == name
        assert name in reply.error["message"]
