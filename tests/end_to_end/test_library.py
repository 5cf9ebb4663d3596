"""From nothing to an answer: a model is fetched from a mirror of the hub, served, asked and removed."""

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import ollama
import pytest
from openai import OpenAI

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, Serve
from tests.hub_mirror import Mirror, hub_mirror
from tests.pseudo_terminal import PseudoTerminal
from weft.server.supervise.checkpoint import DEMO_MODEL

QUESTION, ANSWER = "What is 3 plus 4?", "3 + 4 = 7."


@pytest.fixture
def hub() -> Iterator[Mirror]:
    with hub_mirror() as mirror:
        mirror.add("org/demo", DEMO_MODEL)
        mirror.repositories["org/m-GGUF"] = {"m-Q8_0.gguf": bytes(3_000_000)}
        yield mirror


def weft(hub: Mirror, home: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-m", "weft.server", *arguments], os.environ | hub.environment(home)
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def test_pull_serve_ask_and_remove(hub: Mirror, serve: Serve, tmp_path: pathlib.Path) -> None:
    hub.pause_s = 0.1
    command = [sys.executable, "-m", "weft.server", "pull", "org/demo"]
    with subprocess.Popen(command, env=os.environ | hub.environment(tmp_path), stderr=subprocess.DEVNULL) as killed:
        while not any(file.stat().st_size > 2_000_000 for file in tmp_path.rglob("*.incomplete")):
            assert killed.poll() is None
            time.sleep(0.01)
        killed.kill()
    hub.pause_s = 0.0
    hub.asked.clear()
    assert weft(hub, tmp_path, "pull", "org/demo").returncode == 0
    (start,) = [span.removeprefix("bytes=").partition("-")[0] for name, span in hub.contents() if "model" in name]
    assert int(start) > 2_000_000
    hub.asked.clear()
    server = serve("org/demo", "--device", "cpu", **hub.environment(tmp_path))
    assert hub.asked == []
    with OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=TIMEOUT_S) as client:
        messages = [{"role": "user", "content": QUESTION}]
        answer = client.chat.completions.create(model="org/demo", messages=messages, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == ANSWER
    drive_with_ollamas_client(server)
    assert weft(hub, tmp_path, "rm", "org/demo").returncode == 0
    assert weft(hub, tmp_path, "list").stdout.startswith("the library is empty")


def drive_with_ollamas_client(server: LiveServer) -> None:
    """Ollama's own client pulls, lists, shows and deletes beside the model that is served."""
    name = "org/m-GGUF:Q8_0"
    with ollama.Client(server.base_url, timeout=TIMEOUT_S) as client:
        states = list(client.pull(name, stream=True))
        assert [states[0].status, states[-1].status] == ["pulling manifest", "success"]
        sizes = [(state.completed, state.total) for state in states if state.digest]
        assert sizes[-1] == (3_000_000, 3_000_000)
        served, fetched = client.list().models
        assert (served.model, fetched.model, fetched.size) == ("org/demo", name, 3_000_000)
        assert served.size == (DEMO_MODEL / "model.safetensors").stat().st_size
        assert fetched.details is not None and fetched.details.quantization_level == "Q8_0"
        assert [model.model for model in client.ps().models] == ["org/demo"]
        kept = client.show(name).details
        assert kept is not None and kept.format == "gguf"
        shown = client.show("org/demo").details
        assert shown is not None and (shown.format, shown.quantization_level) == ("safetensors", "bfloat16")
        with pytest.raises(ollama.ResponseError, match="org/demo is served here"):
            client.delete("org/demo")
        assert client.delete(name).status == "success"
        with pytest.raises(ollama.ResponseError) as missing:
            client.delete(name)
        assert missing.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="no such model on the hub"):
            client.pull("org/none")
        assert [model.model for model in client.list().models] == ["org/demo"]


def test_run_fetches_a_model_and_answers(hub: Mirror, tmp_path: pathlib.Path) -> None:
    """On a terminal with a bar, whose total is that of the file."""
    hub.pause_s = 0.02
    command = [sys.executable, "-m", "weft.server", "run", "org/demo", QUESTION]
    with PseudoTerminal(command, columns=120, **hub.environment(tmp_path)) as terminal:
        terminal.wait_for("/5.8 MB")
        terminal.wait_for(ANSWER)
        assert terminal.wait() == 0
