from typing import Any

import pytest

from weft.server.http.auth import host_name, is_loopback, listens_on_loopback

LOOPBACK_HOSTS = [
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "a.localhost:1",
    "127.0.0.1:8000",
    "127.9.9.9",
    "[::1]:8",
    "host.docker.internal:8000",
]
FOREIGN_HOSTS = [
    *(
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "0.0.0.0:8000",
        "10.0.0.1",
    ),
    *("notlocalhost", "localhost@evil.example", "evil.example/localhost", "[::2]", "[::1", "::1", ""),
]


def ask(site: Any, **headers: str) -> int:
    return int(site.call("GET", "/version", headers=headers).status)


@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
def test_a_loopback_name_passes(site: Any, host: str) -> None:
    assert ask(site, host=host) == 200


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_another_name_is_refused_on_loopback_without_a_key(site: Any, host: str) -> None:
    """A web page could rebind its name to 127.0.0.1, use the local server and read the answers."""
    for method, path in (("POST", "/v1/completions"), ("GET", "/"), ("GET", "/stats")):
        reply = site.call(method, path, headers={"host": host})
        assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
        assert repr(host) in reply.error["message"]
        assert "allowed_hosts" in reply.error["message"]


@pytest.mark.parametrize(
    "settings",
    [{"host": "0.0.0.0"}, {"api_key": ("k",)}, {"allowed_hosts": ("*",)}, {"host": "::"}, {"host": "192.0.2.1"}],
)
def test_any_name_passes_where_others_decide(make_site: Any, settings: dict[str, Any]) -> None:
    assert ask(make_site(**settings), host="evil.example", authorization="Bearer k") == 200


@pytest.mark.parametrize("settings", [{}, {"host": "0.0.0.0"}, {"api_key": ("k",)}])
def test_allowed_hosts_adds_names_and_turns_the_check_on(make_site: Any, settings: dict[str, Any]) -> None:
    site = make_site(allowed_hosts=("LLM.example.com", "192.0.2.1:80"), **settings)
    for host, status in {"llm.example.com:443": 200, "192.0.2.1": 200, "localhost": 200, "evil.example": 403}.items():
        assert ask(site, host=host, authorization="Bearer k") == status


def test_the_configured_host_passes(make_site: Any) -> None:
    assert ask(make_site(host="0.0.0.0", allowed_hosts=("a",)), host="0.0.0.0:1") == 200


def test_two_hosts_must_both_pass(site: Any) -> None:
    reply = site.call("GET", "/version", headers=[("host", "localhost"), ("host", "evil.example")])
    assert reply.status == 403


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8000", "http://a.localhost"]
)
def test_a_page_of_this_machine_may_ask(site: Any, origin: str) -> None:
    assert ask(site, origin=origin) == 200


@pytest.mark.parametrize(
    "origin",
    ["null", "", "https://evil.example", "http://localhost.evil.example", "chrome-extension://localhost", "file://"],
)
def test_a_foreign_page_is_refused_on_loopback_without_a_key(make_site: Any, origin: str) -> None:
    reply = make_site().call("GET", "/version", headers={"origin": origin})
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert "cors_origins" in reply.error["message"]
    assert ask(make_site(api_key=("k",)), origin=origin, authorization="Bearer k") == 200
    assert ask(make_site(host="0.0.0.0"), origin=origin) == 200
    assert ask(make_site(cors_origins=("*",)), origin=origin) == 200


def test_a_page_under_the_name_it_asks_may_ask(make_site: Any) -> None:
    site = make_site(allowed_hosts=("*",))
    assert ask(site, host="llm.example.com:8000", origin="https://llm.example.com") == 200
    assert ask(site, host="llm.example.com:8000", origin="https://evil.example") == 403


PAGE = "https://chat.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-a",
}


def test_a_page_that_may_ask_gets_a_preflight_without_a_key_and_may_read(make_site: Any) -> None:
    """Chat UIs that run in a browser could not reach the server."""
    for settings, allowed in (((PAGE, "http://a"), PAGE), (("*",), "*")):
        site = make_site(api_key=("k",), cors_origins=settings)
        reply = site.call("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
        assert (reply.status, reply.text) == (204, "")
        assert reply.headers["access-control-allow-origin"] == allowed
        assert "POST" in reply.headers["access-control-allow-methods"]
        assert reply.headers["access-control-allow-headers"] == "authorization,x-a"
        assert reply.headers["x-request-id"].startswith("req_")
        for key, status in (("k", 200), ("wrong", 401)):
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            reply = site.call("POST", "/v1/completions", json={"prompt": "Hi", "odd": 1}, headers=headers)
            assert reply.status == status
            assert reply.headers["access-control-allow-origin"] == allowed
            exposed = reply.headers["access-control-expose-headers"]
            assert {"x-request-id", "x-ignored-params"} <= set(exposed.split(", "))
            assert ("Origin" in reply.headers.get("vary", "")) == (allowed != "*")


def test_a_page_may_read_what_failed(make_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser saw a network error instead of the answer to an unexpected failure."""
    site = make_site(cors_origins=(PAGE,))

    def fail(*_: object) -> None:
        raise ValueError("secret")

    monkeypatch.setattr("weft.server.apis.openai.models.json_answer", fail)
    reply = site.call("GET", "/v1/models", headers={"origin": PAGE})
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (500, PAGE)
    assert reply.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("settings", [{}, {"cors_origins": ("https://other.example",)}])
def test_other_pages_may_not_read(make_site: Any, settings: dict[str, Any]) -> None:
    site = make_site(host="0.0.0.0", **settings)
    replies = [
        site.call("OPTIONS", "/v1/completions", headers=PREFLIGHT),
        site.call("GET", "/version", headers=PREFLIGHT),
    ]
    assert [reply.status for reply in replies] == [405, 200]
    for reply in replies:
        assert not [name for name in reply.headers if name.startswith("access-control-")]
        assert reply.headers.get("vary") == ("Origin" if settings else None)


def test_a_public_page_may_reach_into_a_private_network_if_it_may_ask(make_site: Any) -> None:
    headers = {**PREFLIGHT, "access-control-request-private-network": "true"}
    reply = make_site(cors_origins=(PAGE,)).call("OPTIONS", "/v1/models", headers=headers)
    assert reply.headers["access-control-allow-private-network"] == "true"


def test_names_and_addresses() -> None:
    assert [host_name(host) for host in ("A.b:80", "[::1]:80", "x", "a b", "a:b")] == ["a.b", "::1", "x", "", ""]
    assert is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("::ffff:10.0.0.1")
    assert listens_on_loopback("localhost")
    assert not listens_on_loopback("")


def test_a_host_is_looked_up_as_the_listener_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"here": "127.0.1.1", "elsewhere": "10.0.0.1"}

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        if host not in found:
            raise OSError(host)
        return [(0, 0, 0, "", (found[host], 0))]

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    assert [listens_on_loopback(host) for host in ("here", "elsewhere", "nowhere")] == [True, False, False]
