import sys
from pathlib import Path

import pytest

from benchmarks.compare import __main__ as command
from benchmarks.compare.measure import Results, Sitting, Start
from benchmarks.compare.servers import Server, ServerError

MODELS = {"main": Path("/m"), "tiny": Path("/t")}


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEERS", str(tmp_path))
    monkeypatch.setenv("LLAMA_SERVER", sys.executable)


def test_workloads_are_chosen_and_shortened() -> None:
    chosen = command.choose_workloads(command.parse(["--workloads", "DA", "--requests", "8"]))
    assert [(workload.key, workload.num_requests) for workload in chosen] == [("A", 4), ("D", 8)]
    running = command.choose_workloads(command.parse(["--url", "http://x"]))
    assert [workload.key for workload in running] == ["A", "B", "C", "L"]
    tiny = command.choose_workloads(command.parse(["--url", "http://x", "--workloads", "D"]))
    assert [workload.key for workload in tiny] == ["D"]


def test_the_command_is_one_to_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert command.describe_command([]) == "make bench"
    flags = ["--runs", "3", "--model", "/home/somebody/model"]
    assert command.describe_command(flags) == "make bench ARGS='--runs 3 --model ~/model'"


@pytest.mark.parametrize("flags", [["--workloads", "AX"], ["--runs", "0"], ["--requests", "0"]])
def test_bad_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(flags)
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("commit", ["d27a9495221f-dirty", "d27a9495221f", None])
def test_figures_that_are_kept_are_those_of_a_commit(
    commit: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of the stored runs say that their tree had changes: nobody can tell what they measured."""
    monkeypatch.setattr(command.machine, "commit", lambda: commit)
    assert command.parse([]).out is None
    if commit == "d27a9495221f-dirty":
        with pytest.raises(SystemExit):
            command.parse(["--out", "benchmarks/results"])
        assert "the working tree has changes beside d27a9495221f-dirty" in capsys.readouterr().err
    else:
        assert command.parse(["--out", "benchmarks/results"]).out == Path("benchmarks/results")


def test_servers_are_weft_its_variants_and_the_peers_that_are_there() -> None:
    options = command.parse(["--variant", "Weft float32=--dtype float32", "--gguf", "/x/qwen3-q8_0.gguf"])
    found = command.find_servers(options, MODELS)
    assert [server.name for server in found] == ["Weft", "Weft float32", "llama.cpp q8_0"]
    assert found[1].command[-2:] == ("--dtype", "float32")
    assert found[2].models == {"main": Path("/x/qwen3-q8_0.gguf")}
    options.servers = "Weft float32,weft"
    assert [server.name for server in command.find_servers(options, MODELS)] == ["Weft float32", "Weft"]
    options.servers = "weft,vllm"
    with pytest.raises(ServerError, match=r"no server vllm: found are Weft, Weft float32, llama\.cpp q8_0"):
        command.find_servers(options, MODELS)


class Interrupted(Sitting):
    """Ctrl-C comes while the second server is measured, in some round."""

    def __init__(self, number: int) -> None:
        self.results = Results()
        self._number = number

    def measure(self, server: Server, number: int) -> None:
        if (server.name, number) == ("B", self._number):
            raise KeyboardInterrupt
        self.results.starts.append(Start(server.name, number, "main", 1.0))


def test_rounds_that_were_complete_survive_an_interruption() -> None:
    found, options = [Server(name, (), {}, "/") for name in "AB"], command.parse(["--runs", "3"])
    sitting = Interrupted(3)
    assert command.measure(sitting, found, options) == 2
    assert [(start.server, start.run) for start in sitting.results.starts] == [("A", 1), ("B", 1), ("A", 2), ("B", 2)]
    assert sitting.results.faults == ["interrupted in round 3"]
    with pytest.raises(KeyboardInterrupt):
        command.measure(Interrupted(1), found, options)
