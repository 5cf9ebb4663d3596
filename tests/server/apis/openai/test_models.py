from typing import Any

import pytest


def test_list(site: Any) -> None:
    answer = site.call("GET", "/v1/models").json
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == ["org/fake model", "alias"]
    assert {(m["object"], m["owned_by"], m["root"], m["max_model_len"]) for m in answer["data"]} == {
        ("model", "weft", "org/fake model", 1000)
    }
    assert answer["data"][0]["shutdown_date"] is None


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
