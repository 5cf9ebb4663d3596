"""The routes that load and unload adapters, and what an adapter is to all others. Supervisor and engine are fakes."""

import asyncio
import os
import pathlib
import threading
import time
from typing import Any

import httpx
import pytest

from tests.server.apis.admin.test_model_admin import ADMIN
from weft.engine.wire.options import MAX_ADAPTERS, Adapter, find_adapter
from weft.engine.wire.waiting_threads import WaitingThreads
from weft.server.apis.admin import models as admin_models
from weft.server.app.app import create_app
from weft.server.errors import ModelFailedError
from weft.server.models.fleet import ASKS_NAME, Ask, Fleet, FleetState, ModelState, ServedAdapter, publish
from weft.server.models.served_model import LiveModels, served_model
from weft.server.settings import Settings


def write(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).touch()
    return folder


@pytest.fixture
def lora_site(
    site: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Any:
    """Models "a" (alias "x"), with slots and the adapter "first", and "b" without; asks come about at once."""
    timeout_s = getattr(request, "param", 0.2)
    monkeypatch.setattr(os, "kill", lambda *_: None)
    (tmp_path / ASKS_NAME).mkdir()
    first = str(write(tmp_path / "first"))
    models = {"a": {"aliases": ["x"], "lora": {"first": first}, "max_loras": 2}, "b": {}}
    site.settings = Settings.model_validate({"models": models, "admin_key": "root", "load_timeout_s": timeout_s})
    fleet = Fleet(tmp_path, site.settings)
    names = {name: served_model(site.engine, site.tokenizer, site.settings.for_model(name)) for name in models}
    site.app = create_app(LiveModels(names, fleet), site.settings, fleet)
    site.asks, site.obeys, site.folder = [], True, tmp_path

    def ask(ask: Ask) -> None:
        site.asks.append(ask)
        adapters = dict(fleet.read().adapters)
        if site.obeys and ask.adapter is not None:
            adapters.pop(ask.adapter.name, None)
            if ask.kind == "add adapter":
                adapters[ask.adapter.name] = ServedAdapter(ask.model, ask.adapter)
            site.tell(adapters)

    def tell(adapters: dict[str, ServedAdapter]) -> None:
        publish(tmp_path, FleetState({name: ModelState("ready") for name in models}, {"x": "a"}, adapters))

    site.tell = tell
    monkeypatch.setattr(fleet, "ask", ask)
    return site


def load(site: Any, name: object, path: object, **body: object) -> Any:
    told = {"lora_name": name, "lora_path": str(path) if isinstance(path, pathlib.Path) else path, **body}
    return site.call("POST", "/v1/load_lora_adapter", json=told, headers=ADMIN)


def unload(site: Any, name: object) -> Any:
    return site.call("POST", "/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


def test_adapters_are_models_with_a_parent(lora_site: Any) -> None:
    site = lora_site
    cards = site.call("GET", "/v1/models").json["data"]
    folder = str(site.folder / "first")
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        *(("a", "a", None), ("x", "a", None), ("b", "b", None)),
        ("first", folder, "a"),
    ]
    assert site.call("GET", "/v1/models/first").json == cards[-1]
    adapter = find_adapter("first", site.folder / "first")
    hi = [{"role": "user", "content": "Hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": hi}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": hi, "max_tokens": 3}),
        ("/api/chat", {"messages": hi, "stream": False}),
        ("/api/generate", {"prompt": "Hi", "stream": False}),
    ):
        reply = site.call("POST", path, json={"model": "first", **body})
        assert (reply.status, reply.json["model"]) == (200, "first"), reply.text
        assert site.engine.asked[-1].adapter == adapter
    assert site.chat(model="a").status == 200
    assert site.engine.asked[-1].adapter is None


def test_an_adapter_is_loaded_by_the_engine_and_then_served_until_it_is_unloaded(lora_site: Any) -> None:
    site, folder = lora_site, write(lora_site.folder / "second")
    assert site.chat(model="second").status == 404
    reply = load(site, "second", folder, is_3d_lora_weight=False)
    assert reply.headers["x-ignored-params"] == "is_3d_lora_weight"
    assert (reply.status, reply.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    adapter = find_adapter("second", folder)
    assert site.engine.asked[-1].adapter == adapter
    assert site.asks == [Ask("add adapter", "a", adapter=adapter)]
    assert site.chat(model="second").status == 200

    for path in (folder, write(site.folder / "third")):
        refused = load(site, "second", path)
        assert (refused.status, refused.error["param"]) == (400, "lora_name")
    assert load(site, "second", site.folder / "third", load_inplace=True).status == 200
    assert site.call("GET", "/v1/models/second").json["root"] == str(site.folder / "third")
    (site.folder / "third" / "adapter_config.json").write_text("{}")
    assert load(site, "second", site.folder / "third", load_inplace=True).status == 200
    assert site.asks[-1].adapter == find_adapter("second", site.folder / "third") != site.asks[-2].adapter

    reply = unload(site, "second")
    assert (reply.status, reply.text) == (200, "Success: LoRA adapter 'second' removed successfully.")
    gone = site.chat(model="second")
    assert (gone.status, gone.error["code"]) == (404, "model_not_found")
    assert (unload(site, "second").status, unload(site, "second").error["param"]) == (404, "lora_name")


@pytest.mark.parametrize(
    ("name", "path", "param", "message"),
    [
        ("", "/x", "lora_name", "pattern"),
        ("a b", "/x", "lora_name", "pattern"),
        ("n" * 201, "/x", "lora_name", "at most 200 characters"),
        (None, "/x", "lora_name", "string"),
        ("new", "", "lora_path", "at least 1 character"),
        ("new", "p" * 5000, "lora_path", "at most 4096 characters"),
        ("new", "/nowhere", "lora_path", "lora_path: no such folder: /nowhere"),
        ("new", "/" + "p" * 300, "lora_path", "File name too long"),
        ("new", "a\0b", "lora_path", "lora_path: "),
        ("new", "~nobody-here/x", "lora_path", "no such folder"),
        ("new", "org/adapter", "lora_path", "no such folder"),
        ("x", "FOLDER", "lora_name", "must not be the name of a model, got x"),
        ("b", "FOLDER", "lora_name", "must not be the name of a model, got b"),
    ],
)
def test_what_is_no_adapter_is_refused_by_field(
    lora_site: Any, name: object, path: str, param: str, message: str
) -> None:
    folder = lora_site.folder / "first"
    refused = load(lora_site, name, folder if path == "FOLDER" else path)
    assert (refused.status, refused.error["param"]) == (400, param), refused.text
    assert message in refused.error["message"]
    assert not lora_site.asks and not lora_site.engine.asked


def test_an_adapter_belongs_to_a_model_that_takes_adapters(lora_site: Any) -> None:
    folder = write(lora_site.folder / "second")
    for model, status, message in (
        ("b", 400, "the model b takes no adapters: max_loras must be at least 1, but is 0"),
        ("first", 400, "model must be a model, got the adapter first"),
        ("c", 404, "the model 'c' does not exist; served here: a, x, b, first"),
    ):
        refused = load(lora_site, "second", folder, model=model)
        assert (refused.status, refused.error["param"], refused.error["message"]) == (status, "model", message)
    assert load(lora_site, "second", folder, model="x").status == 200
    assert lora_site.asks[-1].model == "a"


def test_a_load_that_fails_in_the_engine_changes_nothing(lora_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(lora_site.folder / "second")

    async def fail(_: object) -> None:
        raise ModelFailedError("the adapter second cannot be loaded: the rank must be at most 64, got 99")

    monkeypatch.setattr(lora_site.engine, "generate", fail)
    refused = load(lora_site, "second", folder)
    assert (refused.status, refused.error["param"]) == (400, "lora_path")
    assert refused.error["message"].endswith("the rank must be at most 64, got 99")

    async def wait(_: object) -> None:
        await asyncio.sleep(1000)

    monkeypatch.setattr(lora_site.engine, "generate", wait)
    late = load(lora_site, "second", folder)
    assert (late.status, late.error["code"]) == (503, "model_loading")
    assert not lora_site.asks
    assert lora_site.chat(model="second").status == 404


def test_a_supervisor_that_does_not_answer_is_told(lora_site: Any) -> None:
    lora_site.obeys = False
    assert load(lora_site, "second", write(lora_site.folder / "second")).status == 503
    assert unload(lora_site, "first").status == 503


def test_adapters_are_bounded_and_so_is_the_list_of_them(lora_site: Any) -> None:
    many = {f"n{i:03}": ServedAdapter("a", Adapter(f"n{i:03}", "/n", "")) for i in range(MAX_ADAPTERS)}
    lora_site.tell(many)
    refused = load(lora_site, "new", write(lora_site.folder / "second"))
    assert (refused.status, refused.error["param"]) == (400, "lora_name")
    assert "at most 1000 adapters" in refused.error["message"]
    assert load(lora_site, "n000", lora_site.folder / "second", load_inplace=True).status == 200
    assert len(lora_site.chat(model="c").error["message"]) < 1000
    assert len(lora_site.call("GET", "/v1/models").json["data"]) == MAX_ADAPTERS + 3


def test_without_an_admin_key_nobody_loads(lora_site: Any, site: Any) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"lora_name": "second", "lora_path": "/x"}
        assert lora_site.call("POST", path, json=body).status == 401
        lora_site.app = create_app(lora_site.app.state.context.models, Settings(served_model_name=("a",)))
        refused = lora_site.call("POST", path, json=body, headers=ADMIN)
        assert (refused.status, refused.error["code"]) == (403, "no_admin_key")
        lora_site.app = create_app(lora_site.app.state.context.models, lora_site.settings)


def test_folders_that_hang_hold_up_nobody_and_end_in_time(lora_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine such loads took all threads: no file could be uploaded any more, and the process did not end."""
    site, ends, folder = lora_site, threading.Event(), write(lora_site.folder / "second")
    real, num_stuck = admin_models.find_adapter, []

    def find(name: str, path: pathlib.Path, timeout_s: float) -> Adapter:
        if path.name == "stuck":
            num_stuck.append(name)
            ends.wait(60)
        return real(name, path, timeout_s)

    monkeypatch.setattr(admin_models, "find_adapter", find)
    monkeypatch.setattr(admin_models, "_FOLDERS", WaitingThreads("folders for tests", 4))

    async def both() -> list[httpx.Response]:
        transport = httpx.ASGITransport(site.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=ADMIN) as client:
            bodies = [{"lora_name": f"n{i}", "lora_path": str(site.folder / "stuck")} for i in range(20)]
            loads = [asyncio.create_task(client.post("/v1/load_lora_adapter", json=body)) for body in bodies]
            await asyncio.sleep(0.05)
            file = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("n", b"x")})
            return [file, *await asyncio.gather(*loads)]

    begin = time.monotonic()
    file, *late = asyncio.run(both())
    assert file.status_code == 200, file.text
    assert {(reply.status_code, reply.json()["error"]["code"]) for reply in late} == {(503, "model_loading")}
    assert time.monotonic() - begin < 5, "load_timeout_s is 0.2 s"
    assert len(num_stuck) == 4, "what waited was never begun"
    ends.set()
    assert load(site, "second", folder).status == 200


@pytest.mark.parametrize("lora_site", [2.0], indirect=True)
def test_files_that_are_too_long_to_be_read_in_time_are_refused(lora_site: Any) -> None:
    folder = write(lora_site.folder / "second")
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    reply = load(lora_site, "second", folder)
    assert (reply.status, reply.error["param"]) == (400, "lora_path")
    assert "cannot be read within 1.8 s" in reply.error["message"]
