from typing import Any

import pytest

from tests.chat_templates_for_tests import QWEN3


def test_list(site: Any) -> None:
    answer = site.call("GET", "/v1/models").json
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == ["org/fake model", "alias"]
    assert {(m["object"], m["owned_by"], m["root"], m["max_model_len"]) for m in answer["data"]} == {
        ("model", "weft", "org/fake model", 1000)
    }
    assert answer["data"][0]["shutdown_date"] is None


CODEX_REQUIRES: dict[str, Any] = {
    "slug": str,
    "display_name": str,
    "supported_reasoning_levels": list,
    "shell_type": str,
    "visibility": str,
    "supported_in_api": bool,
    "priority": int,
    "base_instructions": str,
    "support_verbosity": bool,
    "truncation_policy": dict,
    "experimental_supported_tools": list,
    "context_window": int,
}
"""Members without which Codex 0.171 drops the whole catalogue (tried one by one), and the one that it is for."""


def test_codex_finds_the_context_of_every_model(site: Any) -> None:
    reply = site.call("GET", "/v1/models?client_version=0.171.0")
    models = reply.json["models"]
    assert [each["slug"] for each in models] == [each["id"] for each in reply.json["data"]]
    for each in models:
        assert {name: type(each[name]) for name in CODEX_REQUIRES} == CODEX_REQUIRES
        assert (each["context_window"], each["truncation_policy"]) == (1000, {"limit": 256, "mode": "tokens"})
        assert each["base_instructions"]  # Codex has no others then
    assert [each["priority"] for each in models] == [0, 1]


def test_the_catalogue_says_what_a_model_can_do(site: Any) -> None:
    (plain, *_) = site.call("GET", "/v1/models").json["models"]
    assert (plain["apply_patch_tool_type"], plain["supported_reasoning_levels"]) == (None, [])
    site.tokenizer.template = QWEN3
    site.tokenizer.added_ids = {"<think>": 300, "</think>": 301}
    site.rebuild()
    (able, *_) = site.call("GET", "/v1/models").json["models"]
    assert (able["apply_patch_tool_type"], able["supports_parallel_tool_calls"]) == ("freeform", True)
    assert [each["effort"] for each in able["supported_reasoning_levels"]] == ["low", "medium", "high"]


@pytest.mark.parametrize("path", ["org/fake%20model", "org%2Ffake%20model", "alias"])
def test_retrieve(site: Any, path: str) -> None:
    reply = site.call("GET", f"/v1/models/{path}")
    assert reply.status == 200
    assert reply.json["id"] in ("org/fake model", "alias")


def test_unknown(site: Any) -> None:
    reply = site.call("GET", "/v1/models/other")
    assert reply.status == 404
    assert reply.error["code"] == "model_not_found"


def test_the_tag_that_ollamas_clients_add(make_site: Any) -> None:
    site = make_site(served_model_name=("a", "b:latest"))
    for name in ("a", "a:latest", "b:latest"):
        message = {"role": "user", "content": "Hi"}
        reply = site.call("POST", "/api/chat", json={"model": name, "messages": [message], "stream": False})
        assert (reply.status, reply.json.get("model")) == (200, name)
        assert site.call("POST", "/api/show", json={"model": name}).status == 200
    for name in ("b", "b:latest:latest:latest", "c:latest"):
        assert site.call("POST", "/api/show", json={"model": name}).status == 404
    assert site.chat(model="a:latest").status == 404


def test_an_error_does_not_repeat_a_long_name(site: Any) -> None:
    """The message of the 404 held the whole name, however long: megabytes came back."""
    for reply in (site.call("GET", "/v1/models/" + "x" * 10_000), site.chat(model="x" * 10_000)):
        assert reply.status == 404
        assert len(reply.error["message"]) < 300


def test_models_cannot_be_deleted(site: Any) -> None:
    assert site.call("DELETE", "/v1/models/alias").status == 405
