"""What users rely on stays as it is: routes, settings, metrics, architectures, commands, exit codes.

Each is compared with a stored copy; what FastAPI, pydantic and typer write of it only where their versions are those of
the copy. Who means to change one writes the copies anew and shows the difference in the
commit: `python -m pytest tests/end_to_end/test_lock.py --write-lock`.
"""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.end_to_end.conftest import Serve
from weft.server.cli.tables import render_table

STORED = pathlib.Path(__file__).parent / "lock"
COMMANDS = (
    *("", "serve", "batch", "ray", "ray deploy", "chat", "plan", "simulate", "models", "doctor", "config"),
    *("pull", "list", "show", "rm", "run", "ps"),
)
FAULTS = (
    "nothing",
    "serve --nothing",
    "serve /no/such/folder",
    "serve --port many",
    "serve --dtype float8",
    "serve --config /no/such/file",
    "plan /no/such/folder",
    "batch /no/such/file /no/such/folder/out",
    "chat --url http://127.0.0.1:9",
    "models --url http://127.0.0.1:9",
    "show org/none",
    "rm org/none",
    "serve llama3.2",
    "stop",
)
"""Command lines that fail at once."""


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> "Compare":
    return Compare(request.config.getoption("--write-lock"))


class Compare:
    """Compares a text with the stored one, or stores it."""

    def __init__(self, writes: bool) -> None:
        self._writes = writes

    def __call__(self, name: str, text: str, *writers: str) -> None:
        """Writers are the packages that give the text its form."""
        versions = "".join(f"{writer} {importlib.metadata.version(writer)}\n" for writer in writers)
        versions_file = STORED / f"{name}.versions"
        if self._writes:
            (STORED / name).write_text(text, encoding="utf-8")
            if writers:
                versions_file.write_text(versions, encoding="utf-8")
        if writers and versions_file.read_text(encoding="utf-8") != versions:
            pytest.skip(f"{name} was written with {versions_file.read_text(encoding='utf-8')}")
        assert text.splitlines() == (STORED / name).read_text(encoding="utf-8").splitlines()


def _weft(command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
    return subprocess.run(
        [sys.executable, "-m", "weft.server", *command.split()],
        env=environment | {"COLUMNS": "120", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=False,
    )


def _metrics(exposition: str) -> str:
    """Name, type and labels of every metric; the library's own about its process are left out."""
    types = dict(line.split()[2:4] for line in exposition.splitlines() if line.startswith("# TYPE"))
    labels: dict[str, set[str]] = {name: set() for name in types}
    for line in exposition.splitlines():
        if not line.startswith("#"):
            sample, _, rest = line.partition("{")
            name = next(name for name in (sample, sample.rpartition("_")[0]) if name in types or not name)
            labels[name] |= {pair.partition("=")[0] for pair in rest.rpartition("}")[0].split('",')} - {""}
    names = sorted(name for name in types if not name.startswith(("python_", "process_")))
    return "".join(f"{name} {types[name]} {' '.join(sorted(labels[name]))}".rstrip() + "\n" for name in names)


def test_routes_metrics_and_the_end_of_a_server(serve: Serve, compare: Compare) -> None:
    server = serve()
    assert server.get("/v1/models").status_code == 200
    routes = server.get("/openapi.json").json()
    compare("metrics.txt", _metrics(server.get("/metrics").text))
    assert server.stop() == 0
    compare(
        "openapi.json", json.dumps(routes, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "fastapi", "pydantic"
    )


def test_settings(compare: Compare) -> None:
    compare("settings.md", render_table())


def test_commands_and_exit_codes(compare: Compare) -> None:
    helps = [f"{command} --help" for command in COMMANDS]
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip((*helps, *FAULTS), pool.map(_weft, (*helps, *FAULTS)), strict=True))
    codes = {command: (result.returncode, result.stderr.count("\n")) for command, result in results.items()}
    compare("exit_codes.txt", "".join(f"{command}: {code}, {n} lines\n" for command, (code, n) in codes.items()))
    compare("commands.txt", "".join(f"$ weft {command}\n{results[command].stdout}\n" for command in helps), "typer")


def test_architectures(compare: Compare) -> None:
    compare("architectures.txt", _weft("models --architectures").stdout)
