"""Imports point one way, the server process stays small, and functions fit the eye."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SEAMS = {
    "weft.engine.shared.limits",
    "weft.engine.shared.messages",
    "weft.engine.shared.sampling_params",
    "weft.engine.shared.status_page",
    "weft.engine.shared.logs",
    "weft.engine.shared.garbage",
}
SEAMS |= {"weft.engine.models.families.registry", "weft.engine.shared.errors"}  # which models there are
DOWNWARD = {
    "weft.server.render.common": {"weft.server.generate", "weft.server.api"},
    "weft.server.request": {"weft.server.generate", "weft.server.render.common", "weft.server.api"},
    "weft.server.generate": {"weft.server.render.common", "weft.server.api"},
    "weft.server.text": {"weft.server.generate", "weft.server.request", "weft.server.render.common", "weft.server.api"},
    "weft.server.errors": {"weft.server.generate", "weft.server.generate.engine_client"},
}
"""What a part of the server never imports; what a renderer is told (`events`) is everybody's."""
HEAVY = {"torch", "transformers", "weft.engine.core.engine"}


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
        used = imported(path) - {"weft.server.generate.events"}
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
