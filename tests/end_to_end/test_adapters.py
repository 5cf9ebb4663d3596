"""LoRA adapters in a real server of two server processes: named, loaded, replaced, unloaded, broken, under load."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.end_to_end.conftest import ENGINE, SERVER, TIMEOUT_S, LiveServer, serving
from tests.engine.lora.adapters_for_tests import write_adapter
from weft.server.supervise.checkpoint import DEMO_MODEL

ADMIN = {"authorization": "Bearer root"}
KERNELS = "attention=torch,layers=torch,sampler=torch,threads=1"
PROMPT = [300, 301, 302, 20, 21, 22]
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[pathlib.Path, list[int]]]:
    """Adapters of the demo model as PEFT writes them, each with the ids that PEFT's model makes of the prompt."""
    root, found = tmp_path_factory.mktemp("adapters"), {}
    for seed, name in enumerate(NAMES):
        model = write_adapter(DEMO_MODEL, root / name, seed)
        with torch.no_grad():
            ids = model.generate(input_ids=torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        found[name] = root / name, ids[0, len(PROMPT) :].tolist()
    assert len({tuple(ids) for _, ids in found.values()}) == len(NAMES)
    return found


@pytest.fixture(scope="module")
def server(folders: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two of the adapters are configured; there is room for two, so that "c" has to take somebody's."""
    arguments = [f"--lora={name}={folders[name][0]}" for name in "ab"]
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(
        *(log, *arguments, "--dtype", "float32", "--server-processes", "2"),
        WEFT_ADMIN_KEY="root",
        WEFT_KERNELS=KERNELS,
        WEFT_MAX_LORAS="2",
        WEFT_MAX_LORA_RANK="8",
    ) as server:
        yield server


def ask(server: LiveServer, model: str, **body: object) -> httpx.Response:
    """On a connection of its own, so that either server process may answer."""
    told = {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **body}
    return httpx.post(f"{server.base_url}/v1/completions", json=told | {"return_token_ids": True}, timeout=TIMEOUT_S)


def ids(server: LiveServer, model: str, **body: object) -> list[int]:
    reply = ask(server, model, **body)
    assert reply.status_code == 200, reply.text
    token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return token_ids


def manage(server: LiveServer, action: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.base_url}/v1/{action}_lora_adapter", json=body, headers=ADMIN, timeout=TIMEOUT_S)


def in_use(server: LiveServer) -> dict[str, str]:
    families = text_string_to_metric_families(server.get("/metrics").text)
    (sample,) = next(family.samples for family in families if family.name == "weft:lora_requests_info")
    assert abs(sample.value - time.time()) < TIMEOUT_S
    return sample.labels


def test_an_adapter_is_a_model_to_the_sdk_and_answers_as_pefts_does(
    server: LiveServer, folders: dict[str, Any]
) -> None:
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=TIMEOUT_S)
    cards: dict[str, Any] = {card.id: card for card in client.models.list()}
    assert [(name, card.root, card.parent) for name, card in cards.items()] == [
        ("weft-demo", "weft-demo", None),
        *((name, str(folders[name][0]), "weft-demo") for name in "ab"),
    ]
    for name in "ab":
        assert ids(server, name) == folders[name][1] == ids(server, name)  # and again, from the prefix cache
        said = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
        assert said.model == name
    assert ids(server, "weft-demo") not in [folders[name][1] for name in NAMES]
    labels = in_use(server)
    assert (labels["max_lora"], labels["model_name"], server.metric("weft:lora_adapters")) == ("2", "weft-demo", 2)
    listed = subprocess.run(
        [sys.executable, "-m", "weft.server", "models", "--url", server.base_url], capture_output=True, text=True
    )
    assert ["a", "ready", "weft-demo"] in [[*line.split()[:2], line.split()[-1]] for line in listed.stdout.splitlines()]


def test_more_adapters_than_slots_under_load_lose_no_request(server: LiveServer, folders: dict[str, Any]) -> None:
    assert manage(server, "load", lora_name="c", lora_path=str(folders["c"][0])).status_code == 200
    expected = {name: found[1] for name, found in folders.items()} | {"weft-demo": ids(server, "weft-demo")}
    names = [*expected] * 10
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lambda name: ids(server, name), names)) == [expected[name] for name in names]
    assert server.metric("weft:lora_loads_total") > 3
    assert server.metric("weft:lora_slots_used") == 2


def test_an_adapter_survives_an_engine_and_is_gone_everywhere_once_unloaded(
    server: LiveServer, folders: dict[str, Any]
) -> None:
    if ask(server, "c").status_code == 404:  # this test runs alone
        assert manage(server, "load", lora_name="c", lora_path=str(folders["c"][0])).status_code == 200
    assert len(server.children(SERVER)) == 2
    b = folders["b"][0]
    b.rename(b.parent / "elsewhere")  # an engine that must start again does so without it
    os.kill(server.children(ENGINE)[0], signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_S
    while (reply := ask(server, "c")).status_code == 503:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert reply.json()["choices"][0]["token_ids"] == folders["c"][1]
    assert ask(server, "b").status_code == 503
    (b.parent / "elsewhere").rename(b)
    assert ids(server, "b") == folders["b"][1]
    body = {"model": "c", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.base_url}/v1/completions", json=body, timeout=TIMEOUT_S) as stream:
        lines = stream.iter_lines()
        assert '"text"' in next(lines)
        assert manage(server, "unload", lora_name="c").status_code == 200
        assert {ask(server, "c").status_code for _ in range(12)} == {404}
        rest = list(lines)
    assert rest[-2] == "data: [DONE]" and not any('"error"' in line for line in rest)
    assert manage(server, "unload", lora_name="c").status_code == 404
    assert "c" not in {card["id"] for card in server.get("/v1/models").json()["data"]}


def test_what_is_wrong_with_an_adapter_is_told_and_disturbs_nobody(
    server: LiveServer, folders: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    done, others = threading.Event(), []

    def work() -> None:
        while not done.is_set():
            others.append(ids(server, "a") == folders["a"][1])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        copy = pathlib.Path(shutil.copytree(folders["b"][0], tmp_path / "copy"))
        config = json.loads((copy / "adapter_config.json").read_text())
        for change, message in (
            ({"r": 9}, "the rank must be at most 8 (max_lora_rank), got 9"),
            ({"peft_type": "IA3"}, "peft_type must be LORA, got IA3"),
            ({"use_dora": True}, "use_dora is not served"),
            ({"r": 2}, "adapter_model.safetensors"),  # the tensors are of rank 4
        ):
            (copy / "adapter_config.json").write_text(json.dumps(config | change))
            refused = manage(server, "load", lora_name="bad", lora_path=str(copy))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path"), refused.text
            assert message in refused.json()["error"]["message"]
        assert ask(server, "bad").status_code == 404

        (copy / "adapter_config.json").write_text(json.dumps(config))
        assert manage(server, "load", lora_name="brief", lora_path=str(copy)).status_code == 200
        assert ids(server, "brief") == folders["b"][1]
        for name in "ab":  # take its slot
            ids(server, name)
        shutil.rmtree(copy)
        gone = ask(server, "brief")
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "model_failed")
        assert f"the adapter brief cannot be loaded: no such folder: {copy}" == gone.json()["error"]["message"]
        assert manage(server, "unload", lora_name="brief").status_code == 200
    finally:
        done.set()
        thread.join()
    assert others and all(others)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora", "a=/nowhere"], "lora: a: no such folder: /nowhere"),
        (
            ["--lora", "a=FOLDER", "--served-model-name", "a"],
            "lora: a name may stand for one model or adapter, got a twice",
        ),
        (["--lora", "weft-demo=FOLDER"], "lora: a name may stand for one model or adapter, got weft-demo twice"),
        (["--lora", "a=FOLDER", "--lora", "a=FOLDER"], "--lora: input should have each name once, got a twice"),
        (["--lora", "a b=FOLDER"], "--lora: "),
        (["--lora", "FOLDER"], "--lora: input should be of the form name=folder, or name=hub id"),
    ],
)
def test_a_start_with_what_is_no_adapter_ends(folders: dict[str, Any], arguments: list[str], message: str) -> None:
    told = [each.replace("FOLDER", str(folders["a"][0])) for each in arguments]
    command = [sys.executable, "-m", "weft.server", "serve", "--port", "0", *told]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert f"weft: error: {message}" in done.stderr.splitlines()[-1]


def test_a_start_with_a_rank_beyond_the_limit_ends(folders: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "weft.server", "serve", "--port", "0", "--lora", f"a={folders['a'][0]}"]
    environment = os.environ | {"WEFT_MAX_LORA_RANK": "2", "WEFT_KERNELS": KERNELS}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert line.startswith("weft: error: the adapter a cannot be loaded: ")
    assert line.endswith("the rank must be at most 2 (max_lora_rank), got 4")
