"""The house: imports point one way, folders fit the eye, and what starts often stays small.

`docs/order.txt` has the order of folders. Nothing misses it: there is no list of exceptions.
"""

import ast
import functools
import pathlib
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MAX_IN_FOLDER = 15

Edge = tuple[str, str]
"""A file that imports another: both as paths."""

WEB = "fastapi jinja2 starlette tokenizers torch transformers uvicorn"
LIGHT = {
    "engine/families/registry.py": "numpy torch transformers",
    "engine/start/launch.py": f"{WEB} msgspec numpy pydantic",
    "engine/process.py": "llguidance transformers triton zmq",
    "server/ray/policy.py": f"{WEB} ray",
    "server/app/process.py": "mcp numpy ray torch transformers",
    "server/supervise/supervisor.py": f"{WEB} asyncio",
    "server/cli/commands.py": f"{WEB} httpx ray rich",
}
"""What the import of a file must not load: it starts often, or where these are missing."""

USERS_OF_RAY = {f"server/ray/{name}.py" for name in ("app", "deploy", "followers", "router")}


@functools.cache
def _files() -> dict[str, ast.Module]:
    """Read when a test asks: every process that collects tests imports this file."""
    found = {}
    for package in ("engine", "server"):
        for path in sorted((ROOT / package).rglob("*.py")):
            found[path.relative_to(ROOT).as_posix()] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@functools.cache
def _by_name() -> dict[str, str]:
    return {f"weft.{path.removesuffix('.py').replace('/', '.').removesuffix('.__init__')}": path for path in _files()}


def _imported(tree: ast.AST) -> Iterator[str]:
    """Names of the modules that a file imports, at its top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in _by_name() else node.module for name in full)


def _edges() -> set[Edge]:
    return {
        (path, _by_name()[name])
        for path, tree in _files().items()
        for name in _imported(tree)
        if name in _by_name() and _by_name()[name] != path
    }


def _order() -> tuple[dict[str, int], set[str]]:
    """Entries by rank, and those of the engine that the server may import."""
    lines = [line.split() for line in (ROOT / "docs/order.txt").read_text().splitlines() if line[:1] not in ("#", "")]
    return {words[0]: i for i, words in enumerate(lines)}, {words[0] for words in lines if "*" in words}


def _entry(path: str, rank: dict[str, int]) -> str:
    """The longest entry that begins a path; "" if none does."""
    return max((entry for entry in rank if f"{path}/".startswith(f"{entry}/")), key=len, default="")


def _cycles(edges: set[Edge]) -> set[frozenset[str]]:
    """Groups of files that reach each other."""
    after = defaultdict(set)
    for source, target in edges:
        after[source].add(target)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        work = [start]
        while work:
            for target in after[work.pop()] - seen:
                seen.add(target)
                work.append(target)
        return seen

    reach = {path: reached(path) for path in _files()}
    groups = {
        frozenset(other for other in reach[path] if path in reach[other]) for path in _files() if path in reach[path]
    }
    return groups - {frozenset()}


def test_every_file_has_a_place_in_the_order() -> None:
    rank, _ = _order()
    assert [path for path, tree in _files().items() if tree.body and not _entry(path, rank)] == []


def test_imports_inside_a_package_do_not_climb() -> None:
    rank, _ = _order()
    edges = {edge for edge in _edges() if edge[0].split("/")[0] == edge[1].split("/")[0] and _files()[edge[1]].body}
    assert len(edges) > 500
    assert {(a, b) for a, b in edges if rank[_entry(a, rank)] < rank[_entry(b, rank)]} == set()


def test_no_api_imports_another_but_that_of_openai() -> None:
    apis = {edge: {path.split("/")[2] for path in edge if path.startswith("server/apis/")} for edge in _edges()}
    assert len(apis) > 500
    assert [edge for edge, names in apis.items() if len(names - {"openai"}) > 1] == []


def test_the_server_imports_only_what_both_share_and_the_engine_nothing_of_it() -> None:
    rank, shared = _order()
    crossing = {edge for edge in _edges() if edge[0].split("/")[0] != edge[1].split("/")[0] and _files()[edge[1]].body}
    assert {_entry(target, rank) for _, target in crossing} <= shared
    assert ("server/models/engine_client.py", "engine/wire/messages.py") in crossing


def test_no_files_import_each_other() -> None:
    """Not inside functions either."""
    assert _cycles(_edges()) == set()


def test_folders_fit_the_eye() -> None:
    folders = Counter(str(pathlib.Path(path).parent) for path, tree in _files().items() if tree.body)
    assert {folder: count for folder, count in folders.items() if count > MAX_IN_FOLDER} == {}


@pytest.mark.parametrize("path", LIGHT)
def test_what_starts_often_loads_little(path: str) -> None:
    module = next(name for name, file in _by_name().items() if file == path)
    code = f"import {module}, sys; print(*({set(LIGHT[path].split())!r} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


def test_no_file_of_the_server_loads_torch_or_needs_ray() -> None:
    """Ray's own files aside; they are imported where it is installed only."""
    users = {path for path, tree in _files().items() if any(name.split(".")[0] == "ray" for name in _imported(tree))}
    assert users == USERS_OF_RAY
    skipped = {*USERS_OF_RAY - {"server/ray/deploy.py"}, "server/__main__.py"}
    names = sorted(name for name, path in _by_name().items() if path.startswith("server/") and path not in skipped)
    code = (
        f"import importlib, sys\nsys.modules['ray'] = None\nfor n in {names!r}: importlib.import_module(n)\n"
        "print(*{'torch', 'transformers', 'weft.engine.loop.engine'} & sys.modules.keys())"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


def test_no_function_has_more_than_70_lines() -> None:
    """`startup.start` had grown to 76."""
    for path, tree in _files().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 70, f"{path}: {node.name}"
