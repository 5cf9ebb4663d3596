"""Several models in one server: mixed load while models are loaded, unloaded, switched, and killed.

The plan of the real start-up is made tight: beside the model that is always loaded there is room for one other.
"""

import json
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import ENGINE, TIMEOUT_S, LiveServer, serving
from tests.vector_checkpoints import write_model
from weft.server.supervise.checkpoint import DEMO_MODEL

TIGHT = """
import sys
from dataclasses import replace
from weft.server.supervise import supervisor
from weft.server.cli.commands import app
plan = supervisor.shares
def tight(settings):
    shares = plan(settings)
    always = shares.models["chat@v1"].total_bytes
    room = max(share.total_bytes for name, share in shares.models.items() if name != "chat@v1")
    print("BUDGET", always + room, flush=True)
    return replace(shares, budget_bytes={"cpu": always + room})
supervisor.shares = tight
sys.argv = ["weft", *sys.argv[4:]]  # without the interpreter and the module that this stands for
app()
"""
ADMIN = {"authorization": "Bearer root"}
LOADED = ("loading", "ready", "unloading")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "vectors", "qwen3")
    broken = pathlib.Path(shutil.copytree(DEMO_MODEL, folder / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4096])
    chat = {"model": str(DEMO_MODEL), "max_num_seqs": 8}
    models = {
        "chat@v1": {**chat, "aliases": ["chat"]},
        "chat@v2": {**chat, "load": "on-demand"},
        "vectors": {"model": str(folder / "vectors"), "task": "embed", "load": "on-demand", "max_num_seqs": 2},
        "broken": {"model": str(broken), "load": "on-demand"},
    }
    kernels = {"attention": "torch", "layers": "torch", "sampler": "torch", "threads": "1"}
    (folder / "weft.yaml").write_text(
        json.dumps(
            {"models": models, "admin_key": "root", "dtype": "float32", "kv_cache_memory": "32MiB", "kernels": kernels}
        )
    )
    arguments = ("--config", str(folder / "weft.yaml"))
    with serving(folder / "log", *arguments, prefix=(sys.executable, "-c", TIGHT)) as server:
        yield server


def manage(server: LiveServer, action: str, **body: str) -> httpx.Response:
    return httpx.post(f"{server.base_url}/v1/models/{action}", json=body, headers=ADMIN, timeout=TIMEOUT_S)


def states(server: LiveServer) -> dict[str, str]:
    return {card["id"]: card["state"] for card in server.get("/v1/models").json()["data"]}


def eventually(claim: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not claim():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def stream(server: LiveServer, model: str, max_tokens: int = 30) -> str:
    """The text of a whole stream; fails if it is not answered to its end."""
    body = {"model": model, "prompt": "Hi", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.base_url}/v1/completions", json=body, timeout=TIMEOUT_S) as reply:
        text = reply.read().decode()
        assert reply.status_code == 200, text
    assert '"finish_reason":"length"' in text
    assert '"error"' not in text
    assert text.endswith("data: [DONE]\n\n")
    return text


def embed(server: LiveServer) -> None:
    body = {"model": "vectors", "input": ["one", "two"]}
    reply = httpx.post(f"{server.base_url}/v1/embeddings", json=body, timeout=TIMEOUT_S)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["data"]) == 2


class Worker(threading.Thread):
    """Asks again and again; its failure is raised by `end`."""

    def __init__(self, work: Callable[[], Any], may_end: Callable[[int], bool]) -> None:
        super().__init__(daemon=True)
        self.num_done = 0
        self._work, self._may_end = work, may_end
        self._failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            while not self._may_end(self.num_done):
                self._work()
                self.num_done += 1
        except BaseException as error:
            self._failure = error

    def end(self) -> None:
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        if self._failure is not None:
            raise self._failure


def test_no_request_is_lost_while_models_come_go_and_are_switched(server: LiveServer) -> None:
    budget = int(server.log.read_text().split("BUDGET ")[1].split()[0])
    done, most = threading.Event(), 0

    def look() -> None:
        nonlocal most
        cards = server.get("/v1/models").json()["data"]
        loaded = {card["root"]: card["memory_bytes"] for card in cards if card["state"] in LOADED}
        most = max(most, sum(loaded.values()))
        assert sum(loaded.values()) <= budget
        assert len(server.children(ENGINE)) <= 2
        time.sleep(0.02)

    def until_done(_: int) -> bool:
        return done.is_set()

    workers = [
        Worker(lambda: stream(server, "chat"), until_done),
        Worker(lambda: stream(server, "chat@v1", 100), until_done),
        Worker(lambda: stream(server, "chat@v2"), lambda number: number == 1),
        Worker(lambda: embed(server), lambda number: number == 2),
    ]
    watcher = Worker(look, until_done)
    assert manage(server, "load", model="chat@v2").json()["state"] == "ready"
    assert manage(server, "alias", alias="chat", model="chat@v2").status_code == 200
    assert manage(server, "unload", model="chat@v2").status_code == 200
    assert manage(server, "alias", alias="chat", model="chat@v1").status_code == 200
    for worker in workers[2:]:
        worker.end()
    done.set()
    for worker in (*workers, watcher):
        worker.end()
    assert all(worker.num_done for worker in workers)
    assert most > budget / 2  # one of the others was there, too


def test_an_alias_says_which_model_answers(server: LiveServer) -> None:
    def root() -> str:
        return str(server.get("/v1/models/chat").json()["root"])

    assert root() == "chat@v1"
    assert manage(server, "alias", alias="chat", model="vectors").status_code == 200
    assert root() == "vectors"
    assert manage(server, "alias", alias="chat", model="chat@v1").status_code == 200
    refused = manage(server, "alias", alias="vectors", model="chat@v1")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "alias")


def test_a_model_that_cannot_be_loaded_ends_nothing(server: LiveServer) -> None:
    for answer in (
        manage(server, "load", model="broken"),
        httpx.post(f"{server.base_url}/v1/completions", json={"model": "broken", "prompt": "Hi"}, timeout=TIMEOUT_S),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")
        assert "the model broken cannot be loaded: " in answer.json()["error"]["message"]
        assert "retry-after" in answer.headers
    assert states(server)["broken"] == "failed"
    assert server.get("/ready").status_code == 200
    stream(server, "chat")


def test_an_engine_that_is_killed_disturbs_only_its_own_streams(server: LiveServer) -> None:
    (other,) = server.children(ENGINE) if len(server.children(ENGINE)) == 1 else server.children(ENGINE)[:1]
    assert manage(server, "load", model="vectors").json()["state"] == "ready"
    (vectors,) = set(server.children(ENGINE)) - {other}
    long = Worker(lambda: stream(server, "chat", 400), lambda number: number == 1)
    os.kill(vectors, signal.SIGKILL)
    eventually(lambda: vectors not in server.children(ENGINE), "it ends")
    assert server.get("/health").status_code == 200
    embed(server)  # it is restarted, and the request waits for that
    long.end()
    assert other in server.children(ENGINE)


def test_a_wrong_name_lists_all_models(server: LiveServer) -> None:
    reply = httpx.post(f"{server.base_url}/v1/completions", json={"model": "chat@v3", "prompt": "Hi"})
    assert reply.status_code == 404
    assert "served here: chat@v1, chat, chat@v2, vectors, broken" in reply.json()["error"]["message"]
