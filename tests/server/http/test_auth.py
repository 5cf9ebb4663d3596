from typing import Any

import pytest

KEYS = {"api_key": ("first", "sécond")}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/version", "/docs", "/openapi.json", "/nope"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer "},
        {"authorization": "Basic first"},
        {"authorization": "first"},
        {"authorization": b"Bearer \xff"},
    ],
)
def test_without_a_key_every_route_is_shut(make_site: Any, path: str, headers: Any) -> None:
    reply = make_site(**KEYS).call("GET", path, headers=headers)
    assert reply.status == 401
    assert (reply.error["type"], reply.error["code"]) == ("authentication_error", "invalid_api_key")
    assert reply.error["param"] is None
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize("given", [b"Bearer first", b"bearer  first", "Bearer sécond".encode()])
def test_any_of_the_keys_opens(make_site: Any, given: bytes) -> None:
    assert make_site(**KEYS).call("GET", "/v1/models", headers={"authorization": given}).status == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_are_open(make_site: Any, path: str) -> None:
    assert make_site(**KEYS, metrics_auth=True).call("GET", path).status == 200


@pytest.mark.parametrize(("guarded", "status"), [(False, 200), (True, 401)])
def test_metrics_are_guarded_on_request(make_site: Any, guarded: bool, status: int) -> None:
    assert make_site(**KEYS, metrics_auth=guarded).call("GET", "/metrics").status == status


def test_a_wrong_key_is_refused_before_the_body_is_read(make_site: Any) -> None:
    assert make_site(**KEYS, max_body_bytes=10).complete(prompt="x" * 100).status == 401


def test_each_key_is_a_tenant(make_site: Any) -> None:
    site = make_site(**KEYS)
    for key in ("first", "first", "sécond"):
        headers = {"authorization": f"Bearer {key}".encode()}
        site.call("POST", "/v1/completions", json={"prompt": "a", "user": "me"}, headers=headers)
    tenants = [asked.tenant for asked in site.engine.asked]
    assert tenants[0] == tenants[1] != tenants[2]
    assert not {"", "first", "sécond"} & set(tenants)
