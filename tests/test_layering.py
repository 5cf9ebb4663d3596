"""Imports point one way, the server process stays small, and functions fit the eye."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MODEL_NAMES = {"weft.engine.models.families.registry"}
"""Which models there are: the one thing beside `engine/shared` that the server asks the engine's package."""
ORDER = (
    *(
        "errors",
        "schemas",
        "text",
        "formats",
        "settings",
        "mcp",
        "store",
        "model",
        "http",
        "request",
        "generate",
        "render",
        "batch",
        "api",
        "gguf",
        "run",
        "ray",
    ),
    "terminal",
)
"""Rooms of the server. Each imports none that comes later; rendering takes nothing of generating but its events."""
HEAVY = {"torch", "transformers", "weft.engine.core.engine"}


def modules(folder: str) -> dict[str, pathlib.Path]:
    files = {".".join(("weft", *p.relative_to(ROOT).with_suffix("").parts)): p for p in (ROOT / folder).rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


ALL = modules("server") | modules("engine")


def imported(path: pathlib.Path) -> set[str]:
    """Full names of the modules that a file imports; `from weft.engine.shared import logs` counts as the module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in ALL else node.module for name in full}
    return names


def used_by(folder: str, prefix: str) -> set[str]:
    """Modules that begin with the prefix and are imported anywhere in a folder."""
    return {name for path in modules(folder).values() for name in imported(path) if name.startswith(prefix)}


def test_the_engine_never_imports_the_server() -> None:
    assert used_by("engine", "weft.server") == set()


def test_the_server_imports_only_what_both_share() -> None:
    used = used_by("server", "weft.engine.")
    assert {name for name in used if not name.startswith("weft.engine.shared.")} == MODEL_NAMES
    assert "weft.engine.shared.messages" in used


def test_what_both_share_imports_neither() -> None:
    assert {name for name in used_by("engine/shared", "weft.") if not name.startswith("weft.engine.shared.")} == set()


@pytest.mark.parametrize("folder", ["guidance", "speculation", "sampling"])
def test_what_the_core_builds_on_knows_nothing_of_it(folder: str) -> None:
    climbs = used_by(f"engine/{folder}", "weft.engine.core.") | used_by(f"engine/{folder}", "weft.engine.run.")
    assert climbs == set()


@pytest.mark.parametrize("room", ORDER)
def test_no_import_climbs(room: str) -> None:
    path = ROOT / "server" / room
    files = modules(f"server/{room}").values() if path.is_dir() else [path.with_suffix(".py")]
    used = {name for file in files for name in imported(file)}
    later = {f"weft.server.{name}" for name in ORDER[ORDER.index(room) + 1 :]}
    if room == "render":
        later.add("weft.server.generate")
        used.discard("weft.server.generate.events")
    assert files
    assert {name for name in used if ".".join(name.split(".")[:3]) in later} == set()


def test_only_the_room_for_ray_needs_ray() -> None:
    users = {name for name, path in ALL.items() if any(used.split(".")[0] == "ray" for used in imported(path))}
    assert users == {f"weft.server.ray.{name}" for name in ("app", "config_file", "deploy", "followers", "router")}
    names = sorted(
        modules("server").keys()
        - {f"weft.server.ray.{name}" for name in ("app", "config_file", "followers", "router")}
        - {"weft.server.__main__"}
    )
    code = f"import importlib, sys\nsys.modules['ray'] = None\nfor n in {names!r}: importlib.import_module(n)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_server_loads_neither_torch_nor_transformers() -> None:
    names = [name for name in sorted(modules("server")) if not name.endswith("__main__")]
    code = (
        f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\nprint(*({HEAVY!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


def test_no_function_has_more_than_70_lines() -> None:
    """`startup.start` had grown to 76."""
    for path in ALL.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 70, f"{path}: {node.name}"
