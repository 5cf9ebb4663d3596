"""The `weft` command as a user runs it: in a process of its own."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.architectures import table
from tests.hub_mirror import hub_mirror
from tests.server.cli.scripted_server import Script
from weft.server.settings import FLAGS, flag_name
from weft.server.supervise.checkpoint import DEMO_MODEL

TIMEOUT_S = 500.0
"""Longest wait; reached only in a failure."""


def weft(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
    command = [sys.executable, "-m", "weft.server", *arguments]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_config_shows_where_each_value_came_from(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("max_n: 4\nport: 1\n")
    done = weft("config", "/m", "--port", "9", "--config", str(file), "--no-prefix-caching", WEFT_API_KEY="hidden")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in done.stdout.splitlines()}
    assert rows["model"] == "/m MODEL"
    assert rows["port"] == "9 --port"
    assert rows["max_n"] == f"4 {file}:1"
    assert rows["prefix_caching"] == "false --no-prefix-caching"
    assert rows["api_key"] == "1 set, not shown WEFT_API_KEY"
    assert "hidden" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("config", "--prot", "1"), "No such option: --prot"),
        (("config", "--port", "x"), "--port: input should be a valid integer"),
        (("serve", "--strict-params"), "No such option: --strict-params"),
        (("serve", "/no/such/model"), "model: no such folder: /no/such/model"),
        (("plan", "/no/such/model"), "model: no such folder: /no/such/model"),
        (("serve", "phi9:3b"), "model: no such folder: phi9:3b: this is how Ollama names models"),
        (("serve", "llama3.2"), "model: no such folder: llama3.2 (did you mean llama3.2:1b?)"),
        (("show", "org/nothing"), "org/nothing is not in the library: `weft pull org/nothing` fetches it"),
        (("stop",), "there is no command stop: Ctrl-C or SIGTERM ends"),
        (("doctor", "--api-key", ""), "--api-key: input should not be empty"),
        (("sing",), "No such command 'sing'"),
    ],
)
def test_fault_is_one_line_and_exit_code_2(arguments: tuple[str, ...], fault: str) -> None:
    done = weft(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"weft: error: {fault}")
    assert done.stderr.count("\n") == 1


def test_taken_port_is_one_line_and_exit_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = weft("serve", "--port", str(port))
    assert done.returncode == 2
    assert done.stderr.startswith(f"weft: error: cannot listen on 127.0.0.1 port {port}: address already in use by ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_download_ends_it_at_once(tmp_path: pathlib.Path, signum: signal.Signals) -> None:
    """Process 1 of a container has no default actions: SIGTERM during the download from the hub had no effect."""
    with socket.create_server(("127.0.0.1", 0)) as silent_hub:
        silent_hub.settimeout(TIMEOUT_S)
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{silent_hub.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "weft.server", "serve", "org/model"]
        with subprocess.Popen(command, env=os.environ | hub, stderr=subprocess.PIPE) as serving:
            connection, _ = silent_hub.accept()
            serving.send_signal(signum)
            assert serving.wait(TIMEOUT_S) == 0
            assert serving.communicate()[1] == b""
            connection.close()


def test_help_names_every_flag_and_version_is_short() -> None:
    text = weft("serve", "--help").stdout
    assert all(f" {flag_name(name)} " in text for name in FLAGS)
    assert " --config " in text
    assert weft("--version").stdout.startswith("weft ")
    assert "serve" in weft().stdout


def test_models_lists_every_architecture_and_why_it_is_refused() -> None:
    text = weft("models", "--architectures").stdout
    assert text.startswith(f"Of {len(table.load()['entries'])} model types in transformers ")
    assert re.search(r"\nserved by Weft's own layers \(\d+\)\n  .*\bllama\b", text, re.DOTALL)
    assert re.search(r"\nno decoder: an encoder, which sees what follows a token \(\d+\)\n  bert, big_bird, ", text)


def test_models_lists_those_of_a_running_server(script: Script) -> None:
    """What another server than Weft does not tell is a dash."""
    now = time.time()
    script.models = [
        {"id": "chat", "state": "loaded", "memory_bytes": 12_340_000_000, "last_used": now - 1e5},
        {"id": "tuned", "state": "loaded", "last_used": None, "parent": "chat"},
        {"id": "embed", "state": "unloaded", "memory_bytes": None, "last_used": None},
        "a\x1b[2J",
    ]
    done = weft("models", "--url", script.url, OPENAI_API_KEY="key")
    assert done.stdout.splitlines() == [
        "model  state     memory    last use  adapter of",
        "chat   loaded    12.34 GB  1 d ago   -",
        "tuned  loaded    -         never     chat",
        "embed  unloaded  -         never     -",
        "a[2J   -         -         -         -",
    ]
    assert script.headers[0]["Authorization"] == "Bearer key"


def test_models_without_a_server_says_what_else_it_could_mean() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    done = weft("models", "--url", url)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"weft: error: cannot reach {url}/v1: ")
    assert "name another place with --url" in done.stderr and "weft models --architectures" in done.stderr


def test_command_line_imports_neither_tensors_nor_the_web() -> None:
    code = (
        "import sys, weft.server.__main__, weft.server.cli.commands\n"
        "import weft.server.supervise.supervisor, weft.server.supervise.checkpoint\n"
        "print([m for m in ('torch', 'transformers', 'fastapi', 'uvicorn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert done.stdout == "[]\n"


def test_plan_of_a_hub_id_fetches_its_configuration_and_nothing_else(tmp_path: pathlib.Path) -> None:
    """It downloaded the weights first."""
    with hub_mirror() as hub:
        hub.add("org/model", DEMO_MODEL)
        done = weft("plan", "org/model", **hub.environment(tmp_path))
    assert done.returncode == 0, done.stderr
    plan = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)
    weights_bytes = (DEMO_MODEL / "model.safetensors").stat().st_size
    assert float(plan["weights"].removesuffix(" MB")) == pytest.approx(weights_bytes / 1e6, rel=0.02)
    assert re.search(r"^at once +\d+ with 1,024 tokens each, \d+ with 4,096 tokens each \(never", done.stdout, re.M)
    names = {path.rpartition("/")[2] for _, path, _ in hub.asked if "/resolve/" in path}
    assert names == {"config.json", "generation_config.json"}


@pytest.mark.parametrize(("port", "found"), [("9", "9"), ("many", "8000")])
def test_clients_ask_where_a_server_of_this_environment_listens(port: str, found: str) -> None:
    done = weft("chat", "--help", WEFT_PORT=port)
    assert f"default: http://127.0.0.1:{found}]" in " ".join(done.stdout.split())
