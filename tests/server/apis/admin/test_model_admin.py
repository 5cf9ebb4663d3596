"""The routes that manage models, and what requests to a model see that is not loaded. No engine is needed."""

import asyncio
import os
import pathlib
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from weft.server.apis.admin import models as model_admin
from weft.server.app.app import create_app
from weft.server.errors import ModelLoadingError
from weft.server.models.fleet import ASKS_NAME, Ask, Fleet, FleetState, ModelState, publish, take_asks
from weft.server.models.served_model import LiveModels, served_model
from weft.server.settings import Settings

MODELS = {"a": {"aliases": ["x"]}, "b": {"load": "on-demand"}}
ADMIN = {"authorization": "Bearer root"}


class Loading:
    """A client whose model is loaded once it may be."""

    def __init__(self, usual: Any) -> None:
        self.usual, self.may_go_on, self.failure = usual, True, None
        self.info, self.status, self.meet, self.generate = usual.info, usual.status, usual.meet, usual.generate

    async def load(self) -> None:
        while not self.may_go_on:
            await asyncio.sleep(0.01)
        if self.failure:
            raise self.failure


@pytest.fixture
def fleet_site(site: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A site with a model on demand; `site.obey` is the supervisor."""
    monkeypatch.setattr(os, "kill", lambda *_: None)
    (tmp_path / ASKS_NAME).mkdir()
    told = {"models": MODELS, "admin_key": "root", "load_timeout_s": 0.1, "sse_ping_s": 0.05}
    site.settings = Settings.model_validate(told)
    site.loading = Loading(site.engine)
    fleet = Fleet(tmp_path, site.settings)
    served = {
        name: served_model(client, site.tokenizer, site.settings.for_model(name), on_demand=name == "b")
        for name, client in (("a", site.engine), ("b", site.loading))
    }
    site.served, site.fleet = LiveModels(served, fleet), fleet
    site.app = create_app(site.served, site.settings, fleet)
    site.tell = lambda b, **aliases: publish(tmp_path, FleetState({"a": ModelState("ready"), "b": b}, aliases))
    site.asks = lambda: list(take_asks(tmp_path))
    return site


def manage(site: Any, action: str, headers: dict[str, str] | None = ADMIN, **body: str) -> Any:
    return site.call("POST", f"/v1/models/{action}", json=body, headers=headers or {})


def test_only_an_admin_key_manages_models(fleet_site: Any) -> None:
    fleet_site.tell(ModelState("unloaded"))
    for headers, status in (({}, 401), ({"authorization": "Bearer other"}, 401), (ADMIN, 200)):
        assert manage(fleet_site, "load", headers, model="a").status == status
    fleet_site.app = create_app(fleet_site.app.state.context.models, Settings(served_model_name=("a",)))
    refused = manage(fleet_site, "load", model="a")
    assert (refused.status, refused.json["error"]["code"]) == (403, "no_admin_key")
    assert "admin_key" in refused.json["error"]["message"]
    assert fleet_site.call("GET", "/v1/models").status == 200


def test_what_is_asked_reaches_the_supervisor_and_what_does_not_come_about_is_told(fleet_site: Any) -> None:
    refused = manage(fleet_site, "load", model="b")
    assert (refused.status, refused.json["error"]["code"]) == (503, "model_loading")
    assert fleet_site.asks() == [Ask("load", "b")]
    fleet_site.tell(ModelState("ready", memory_bytes=7), x="a")
    assert manage(fleet_site, "load", model="b").json == {"model": "b", "state": "ready", "memory_bytes": 7}
    assert manage(fleet_site, "unload", model="b").json["state"] == "ready"
    assert manage(fleet_site, "alias", model="b", alias="x").status == 503
    assert manage(fleet_site, "alias", model="a", alias="x").status == 200
    assert {ask.kind for ask in fleet_site.asks()} == {"unload", "alias"}
    for action, body, param in (
        ("unload", {"model": "a"}, "model"),
        ("alias", {"model": "a", "alias": "b"}, "alias"),
        ("load", {"model": "a b"}, "model"),
        ("alias", {"model": "a"}, "alias"),
        *(
            ("alias", {"model": "a", "alias": f"x{bad}y"}, "alias")
            for bad in ("\0", "\x1b[31m", "\n", "\x7f", "\x9b", " ", ",")
        ),
    ):
        refused = manage(fleet_site, action, **body)
        assert (refused.status, refused.json["error"]["param"]) == (400, param)
    for any_model_name in (False, True):
        fleet_site.settings = fleet_site.settings.model_copy(update={"any_model_name": any_model_name})
        fleet_site.app = create_app(fleet_site.served, fleet_site.settings, fleet_site.fleet)
        unknown = manage(fleet_site, "load", model="c")
        assert unknown.status == 404
        assert "served here: a, x, b" in unknown.json["error"]["message"]


def test_a_model_is_unloaded_once_even_if_requests_have_it_loaded_again(
    fleet_site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = []

    def obey(ask: Ask) -> None:
        asks.append(ask)
        fleet_site.tell(ModelState("loading", num_unloaded=1))

    fleet_site.tell(ModelState("ready"))
    monkeypatch.setattr(fleet_site.app.state.context.fleet, "ask", obey)
    monkeypatch.setattr(model_admin.fleets, "ASK_EVERY_S", 0.0)
    assert manage(fleet_site, "unload", model="b").status == 200
    assert len(asks) == 1, "a second one would end what is being loaded for others"


def test_cards_tell_the_state_and_follow_the_aliases(fleet_site: Any) -> None:
    fleet_site.tell(ModelState("unloaded", memory_bytes=5, last_used=3.0), x="b")
    cards = {card["id"]: card for card in fleet_site.call("GET", "/v1/models").json["data"]}
    assert list(cards) == ["a", "b", "x"]
    assert [cards[name]["root"] for name in cards] == ["a", "b", "b"]
    assert [cards[name]["state"] for name in cards] == ["ready", "unloaded", "unloaded"]
    assert (cards["x"]["memory_bytes"], cards["x"]["last_used"]) == (5, 3.0)
    fleet_site.loading.failure = AssertionError("a card needs no loaded model")
    assert fleet_site.call("GET", "/v1/models/x").json["root"] == "b"


def test_what_is_known_of_a_model_is_shown_without_loading_it(fleet_site: Any) -> None:
    fleet_site.tell(ModelState("unloaded"))
    fleet_site.loading.failure = ModelLoadingError("not in time")
    assert fleet_site.call("POST", "/api/show", json={"model": "b"}).status == 200
    fleet_site.loading.info = None
    assert fleet_site.call("POST", "/api/show", json={"model": "b"}).status == 503


def test_metrics_tell_the_state_of_each_model(fleet_site: Any) -> None:
    fleet_site.tell(ModelState("failed", memory_bytes=5, num_failures=2, num_unloaded=3))
    text = fleet_site.call("GET", "/metrics").text
    assert 'weft:model_state{model_name="b",state="failed"} 1.0' in text
    assert 'weft:model_state{model_name="b",state="ready"} 0.0' in text
    assert 'weft:model_state{model_name="a",state="ready"} 1.0' in text
    assert 'weft:model_memory_bytes{model_name="b"} 0.0' in text
    assert 'weft:model_unloads_total{model_name="b"} 3.0' in text
    assert 'weft:model_load_failures_total{model_name="b"} 2.0' in text
    fleet_site.tell(ModelState("ready", memory_bytes=5))
    assert 'weft:model_memory_bytes{model_name="b"} 5.0' in fleet_site.call("GET", "/metrics").text


def test_a_request_that_has_begun_stays_with_its_model(fleet_site: Any) -> None:
    """Its tools are read with the formats of one, so its prompt must be made for that one."""
    context = fleet_site.app.state.context
    begun, later = (Request({"type": "http", "path": "/v1/chat/completions"}) for _ in range(2))
    fleet_site.tell(ModelState("ready"), x="a")
    assert context.find_model(begun, "x").name == "a"
    fleet_site.tell(ModelState("ready"), x="b")
    assert [context.find_model(each, "x").name for each in (begun, later)] == ["a", "b"]
    assert begun.state.model_name == "a"


def test_a_model_that_is_not_loaded_is_no_fault_of_the_server(fleet_site: Any) -> None:
    fleet_site.loading.info = None
    for path in ("/health", "/ready"):
        assert fleet_site.call("GET", path).status == 200


@pytest.mark.parametrize(
    ("path", "body", "ping", "error"),
    [
        ("/v1/completions", {"prompt": "Hi"}, b": ping\n\n", b'"code":"model_loading"'),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, b": ping\n\n", b"model_loading"),
        ("/v1/responses", {"input": "Hi"}, b": ping\n\n", b"model_loading"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
            b"event: ping\n",
            b"event: error\n",
        ),
    ],
)
def test_a_stream_is_kept_alive_while_its_model_is_loaded(
    fleet_site: Any, path: str, body: dict[str, Any], ping: bytes, error: bytes
) -> None:
    for failure in (None, ModelLoadingError("not in time")):
        fleet_site.loading.may_go_on, fleet_site.loading.failure = False, failure
        sent, asked = b"", {"model": "b", "stream": True} | body
        with fleet_site.live() as url, httpx.stream("POST", f"{url}{path}", json=asked, timeout=60) as reply:
            assert reply.status_code == 200
            for data in reply.iter_bytes():
                sent += data
                fleet_site.loading.may_go_on |= ping in sent
        assert ping in sent
        assert (error in sent) == (failure is not None)
