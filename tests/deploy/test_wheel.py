"""The wheel holds every package and what they read, under names that are nobody else's."""

import json
import os
import pathlib
import site
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, reserved_port
from tests.engine.native_variants import CACHE
from tests.hub_mirror import hub_mirror
from weft.engine.kernels.cpu.variants import VARIANTS
from weft.server.supervise.checkpoint import DEMO_MODEL

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = {"weft.server": "server", "weft.engine": "engine"}
BUILT = {".pyc", ".so", ".o"}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What setup.py and pyproject.toml tell setuptools."""
    code = """
import json, setuptools
from distutils.core import run_setup
found = run_setup("setup.py", stop_after="config")
found.parse_config_files()
print(json.dumps([found.packages, found.package_dir, found.package_data]))
"""
    run = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, check=True, text=True)
    return dict(zip(("packages", "package_dir", "package_data"), json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_every_folder_with_modules_is_a_package(found: dict[str, Any]) -> None:
    """They are found by their `__init__.py`, and their names are not those of the folders."""
    folders = {path.parent.relative_to(ROOT) for top in FOLDERS.values() for path in (ROOT / top).rglob("*.py")}
    assert found["package_dir"] == FOLDERS
    assert sorted(found["packages"]) == sorted("weft." + ".".join(folder.parts) for folder in folders)


def test_every_other_file_is_data_of_a_package(found: dict[str, Any]) -> None:
    packed = {path for name, patterns in found["package_data"].items() for path in _match(name, patterns)}
    files = {path for top in FOLDERS.values() for path in (ROOT / top).rglob("*") if path.is_file()}
    assert {path for path in files if path.suffix not in {".py", *BUILT}} == packed


def _match(package: str, patterns: list[str]) -> Iterator[pathlib.Path]:
    folder = ROOT.joinpath(*package.split(".")[1:])
    for pattern in patterns:
        yield from (path for path in folder.glob(pattern) if path.is_file())


@pytest.mark.slow
def test_an_installed_wheel_serves_beside_a_foreign_server_module(tmp_path: pathlib.Path) -> None:
    """Installed, the packages were called `server` and `engine` in everybody's site-packages."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    cached = {**environment, "XDG_CACHE_HOME": str(CACHE.parents[1])}
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)], check=True, env=cached)
    (wheel,) = tmp_path.glob("weft-*-py3-none-linux_*.whl")
    kernels = {f"weft/engine/kernels/cpu/{name}.so" for name in VARIANTS}
    assert {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")} == kernels
    python = tmp_path / "environment" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "environment")], check=True)
    subprocess.run([*pip, "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    # What Weft needs comes from here. A path in a .pth file brings no .pth files of its own, so not this checkout.
    (packages / "needed.pth").write_text("\n".join(site.getsitepackages()))
    for name in ("server", "engine"):
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text("raise RuntimeError('foreign')")
    files = {path.relative_to(packages).parts[0] for path in packages.iterdir()}
    assert {"weft", "server", "engine"} <= files
    weft = str(python.with_name("weft"))
    with hub_mirror() as hub, reserved_port() as port, (tmp_path / "log").open("wb") as log:
        hub.add("org/demo", DEMO_MODEL)
        environment |= hub.environment(tmp_path)
        subprocess.run([weft, "pull", "org/demo"], cwd=packages, env=environment, check=True)
        command = [weft, "serve", "org/demo", "--port", str(port), "--device", "cpu"]
        process = subprocess.Popen(command, cwd=packages, env=environment, stderr=log)
        server = LiveServer(process, port, tmp_path / "log")
        try:
            server.wait_ready()
            body = {"model": "org/demo", "prompt": "What is", "max_tokens": 4, "ignore_eos": True}
            answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=TIMEOUT_S).json()
            assert answer["usage"]["completion_tokens"] == 4
        finally:
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
        subprocess.run([weft, "rm", "org/demo"], cwd=packages, env=environment, check=True)
    log_text = (tmp_path / "log").read_text()
    assert "source has changed" not in log_text
