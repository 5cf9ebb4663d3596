"""Imports point one way, the server process stays small, and functions fit the eye."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SEAMS = {
    "engine.limits",
    "engine.protocol",
    "engine.sampling_params",
    "engine.status_page",
    "engine.logs",
    "engine.garbage",
}
SEAMS |= {"engine.models.registry", "engine.models.errors"}  # which models there are
DOWNWARD = {
    "server.render": {"server.generate", "server.api"},
    "server.request": {"server.generate", "server.render", "server.api"},
    "server.generate": {"server.render", "server.api"},
    "server.text": {"server.generate", "server.request", "server.render", "server.api"},
    "server.errors": {"server.generate", "server.engine_client"},
}
"""What a part of the server never imports; what a renderer is told (`events`) is everybody's."""
HEAVY = {"torch", "transformers", "engine.engine"}


def modules(package: str) -> dict[str, pathlib.Path]:
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / package).rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


def imported(path: pathlib.Path) -> set[str]:
    """Full names of the modules that a file imports; `from engine import logs` counts as engine.logs."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            is_package = node.module in ("engine", "server")
            names |= {f"{node.module}.{a.name}" for a in node.names} if is_package else {node.module}
    return names


def test_the_engine_never_imports_the_server() -> None:
    assert [n for n, p in modules("engine").items() if any(i.split(".")[0] == "server" for i in imported(p))] == []


def test_the_server_imports_only_the_seams_of_the_engine() -> None:
    used = {i for path in modules("server").values() for i in imported(path) if i.split(".")[0] == "engine"}
    assert used - SEAMS == set()
    assert used


@pytest.mark.parametrize("part", DOWNWARD)
def test_no_import_climbs(part: str) -> None:
    files = {name: path for name, path in modules("server").items() if name.startswith(part)}
    assert files
    for name, path in files.items():
        used = imported(path) - {"server.generate.events"}
        assert [i for i in used if i.startswith(tuple(DOWNWARD[part]))] == [], name


def test_the_server_loads_neither_torch_nor_transformers() -> None:
    names = [name for name in sorted(modules("server")) if not name.endswith("__main__")]
    code = (
        f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\nprint(*({HEAVY!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


def test_no_function_has_more_than_70_lines() -> None:
    """`startup.start` had grown to 76."""
    for path in (modules("engine") | modules("server")).values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 70, f"{path}: {node.name}"
