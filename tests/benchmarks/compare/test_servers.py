"""Servers start as they should, and nothing of them is left."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.compare import servers
from benchmarks.compare.servers import Server, ServerError
from benchmarks.compare.workloads import WORKLOADS

BY_KEY = {workload.key: workload for workload in WORKLOADS}
MODELS = {"main": Path("/m"), "tiny": Path("/t")}

TIMEOUT_S = 300.0
"""Of what is waited for; only a failure takes so long."""


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended; one that nobody has waited for yet has ended, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter between opening and reading
        return True


def test_a_server_is_ready_when_it_says_so_and_ends_with_its_children(
    fake: Callable[..., Server], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with servers.running(fake("--delay", "0.5", "--child"), WORKLOADS[:1], log, TIMEOUT_S) as running:
        assert running.startup_s is not None
        assert running.startup_s > 0.5
        assert servers.model_name(running.url) == "fake"
        assert servers.version(running.url) == "1.2.3"
        while "child\n" not in log.read_text():  # only then does it ignore signals
            time.sleep(0.01)
        child = int(log.read_text().split("child ")[1].split()[0])
        assert not is_gone(child)
    deadline = time.monotonic() + TIMEOUT_S
    while not is_gone(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert servers.get(running.url, "/ready") == (0, b"")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_server_ends_with_whoever_uses_it(
    error: type[BaseException], fake: Callable[..., Server], tmp_path: Path
) -> None:
    with pytest.raises(error), servers.running(fake(), WORKLOADS[:1], tmp_path / "log", TIMEOUT_S) as running:
        raise error
    assert servers.get(running.url, "/ready") == (0, b"")


def test_a_server_that_dies_shows_its_last_words(fake: Callable[..., Server], tmp_path: Path) -> None:
    log = tmp_path / "log"
    dying = servers.running(fake("--die", "--delay", "0.1"), WORKLOADS[:1], log, TIMEOUT_S)
    with pytest.raises(ServerError, match="Fake ended with exit code 1") as raised, dying:
        pytest.fail("it was never ready")
    (note,) = raised.value.__notes__
    assert note.startswith(f"$ {sys.executable} ")
    assert note.endswith(f"the weights are gone\n(the whole log: {log})")


def test_a_server_that_is_never_ready_is_given_up(fake: Callable[..., Server], tmp_path: Path) -> None:
    slow = servers.running(fake("--delay", "60"), WORKLOADS[:1], tmp_path / "log", 0.3)
    with pytest.raises(ServerError, match=r"Fake was not ready after 0\.3 s"), slow:
        pytest.fail("it was never ready")


def test_workloads_are_grouped_by_model_or_alone() -> None:
    chosen = [BY_KEY[key] for key in "ABD"]
    weft = servers.weft(MODELS)
    assert [[w.key for w in group] for group in weft.groups(chosen)] == [["A", "B"], ["D"]]
    assert servers.weft({"main": Path("/m")}).groups([BY_KEY["D"]]) == []
    assert weft.arguments([BY_KEY["D"]], 80)[1:] == ["serve", "/t", "--port", "80"]
    assert weft.ready_path == "/ready"


def test_llama_cpp_is_sized_for_each_workload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLAMA_SERVER", sys.executable)
    server = servers.llama_cpp("llama.cpp", MODELS)
    assert [[w.key for w in group] for group in server.groups([BY_KEY["A"], BY_KEY["C"]])] == [["A"], ["C"]]
    flags = ["-m", "/m", "--port", "80", "--host", "127.0.0.1", "-np", "8", "-c", str(8 * (1024 + 64 + 32 + 16))]
    assert server.arguments([BY_KEY["C"]], 80) == [sys.executable, *flags]
    monkeypatch.setenv("LLAMA_SERVER", str(tmp_path / "nothing"))
    with pytest.raises(ServerError, match="neither on the path"):
        servers.llama_cpp("llama.cpp", MODELS)


def test_vllm_is_found_where_peers_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEERS", str(tmp_path))
    assert servers.vllm(MODELS) is None
    program = tmp_path / "vllm" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.touch()
    server = servers.vllm(MODELS)
    assert server is not None
    assert server.arguments([BY_KEY["A"]], 80)[:3] == [str(program), "serve", "/m"]
    assert server.environment["VLLM_CPU_OMP_THREADS_BIND"] == f"0-{(os.cpu_count() or 1) - 1}"
