"""The Dockerfile, as far as it can be judged without building it."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
Instruction = tuple[str, str]


def instructions() -> Iterator[Instruction]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip():
            word, rest = line.split(maxsplit=1)
            yield word, " ".join(rest.split())


@pytest.fixture(scope="module")
def stages() -> dict[str, list[Instruction]]:
    """By name of the stage: its instructions, the FROM first."""
    found: dict[str, list[Instruction]] = {}
    for word, rest in instructions():
        if word == "FROM":
            found[rest.split(" AS ")[1]] = []
        if found:
            list(found.values())[-1].append((word, rest))
    return found


def lineage(stages: dict[str, list[Instruction]], name: str) -> list[Instruction]:
    """The instructions of a stage and of those that it is built from."""
    base = stages[name][0][1].split(" AS ")[0]
    return (lineage(stages, base) if base in stages else []) + stages[name]


def the_only(found: list[Instruction], word: str) -> str:
    (rest,) = (rest for name, rest in found if name == word)
    return rest


def test_hadolint_has_nothing_to_say() -> None:
    linter = shutil.which("hadolint", path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.defpath]))
    if linter is None:
        pytest.skip("hadolint is not installed")
    checked = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_cpu_image_is_the_default(stages: dict[str, list[Instruction]]) -> None:
    assert list(stages)[-1] == "cpu"


def test_base_images_are_pinned() -> None:
    bases = [rest.split(" AS ")[0] for word, rest in instructions() if word == "FROM"]
    arguments = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")
    external = {arguments[base.strip("${}")] for base in bases if base.startswith("$")}
    assert external
    assert all(re.search(r":\d+\.\d+\.\d+-", image) for image in external)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_without_root_and_says_how_it_is(stages: dict[str, list[Instruction]], target: str) -> None:
    found = lineage(stages, target)
    assert found[-1] == ("USER", "1000:1000")
    assert "--uid 1000" in next(rest for word, rest in found if word == "RUN" and "useradd" in rest)
    assert "/health" in the_only(found, "HEALTHCHECK")
    assert the_only(found, "STOPSIGNAL") == "SIGTERM"
    assert the_only(found, "EXPOSE") == "8000"
    assert the_only(found, "VOLUME") == "/cache"
    assert json.loads(the_only(found, "ENTRYPOINT")) == ["weft"]
    assert json.loads(the_only(found, "CMD")) == ["serve"]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_dependencies_come_before_the_source(stages: dict[str, list[Instruction]], target: str) -> None:
    (origin,) = (rest.split()[0] for word, rest in stages[target] if word == "COPY")
    steps = [f"{word} {rest}" for word, rest in lineage(stages, origin.removeprefix("--from="))]
    order = ["torch==2.13.0", "--requirement requirements.txt", "--from=wheel"]
    places = [next(i for i, step in enumerate(steps) if part in step) for part in order]
    assert places == sorted(places)
    sources = [rest for _, rest in lineage(stages, "requirements") if rest.startswith(("engine", "server"))]
    assert sources == [], "the list of dependencies must not depend on the source"


def test_the_requirements_are_those_of_the_package(stages: dict[str, list[Instruction]]) -> None:
    command = next(rest for word, rest in stages["requirements"] if word == "RUN").split(" > ")[0]
    for extras, package in (("", "pyzmq>="), ("events,mcp", "mcp>=")):
        environment = os.environ | {"EXTRAS": extras}
        shell = ["sh", "-c", command]
        run = subprocess.run(shell, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
        assert {"torch>=", package} <= {line[: line.find("=") + 1] for line in run.stdout.splitlines()}
        assert "pytest" not in run.stdout


def test_what_is_copied_exists_and_reaches_the_build() -> None:
    copied = [
        path
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
        for path in rest.split()[:-1]
    ]
    ignored = [
        line
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert {"engine", "server", "pyproject.toml"} <= set(copied)
    for path in copied:
        assert (ROOT / path).exists()
        assert f"!{path}" in ignored
    assert ignored[0] == "*", "what is not named stays out: .git, .venv, secrets"
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert kept == set(copied)


class _Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(("status", "is_healthy"), [(200, True), (503, False)])
def test_the_health_check_tells_healthy_from_not(
    stages: dict[str, list[Instruction]], status: int, is_healthy: bool
) -> None:
    check = the_only(stages["runtime"], "HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    handler = type("Handler", (_Health,), {"status": status})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        environment = os.environ | {"WEFT_PORT": str(server.server_port)}
        ended = subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True, check=False)
        server.shutdown()
        thread.join()
    assert (ended.returncode == 0) is is_healthy
