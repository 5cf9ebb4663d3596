"""The wheel holds every package and what they read, under names that are nobody else's."""

import os
import pathlib
import site
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import httpx
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, reserved_port

ROOT = pathlib.Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = {"weft.server": "server", "weft.engine": "engine"}
BUILT = {".pyc", ".so", ".o"}


def test_every_folder_with_modules_is_a_package() -> None:
    """They are listed by hand, since their names are not those of the folders."""
    folders = {path.parent.relative_to(ROOT) for top in FOLDERS.values() for path in (ROOT / top).rglob("*.py")}
    assert SETUPTOOLS["package-dir"] == FOLDERS
    assert SETUPTOOLS["packages"] == sorted("weft." + ".".join(folder.parts) for folder in folders)


def test_every_other_file_is_data_of_a_package() -> None:
    packed = {path for name, patterns in SETUPTOOLS["package-data"].items() for path in _match(name, patterns)}
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
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
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
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with reserved_port() as port, (tmp_path / "log").open("wb") as log:
        command = [str(python.with_name("weft")), "serve", "--port", str(port), "--device", "cpu"]
        process = subprocess.Popen(command, cwd=packages, env=environment, stderr=log)
        server = LiveServer(process, port, tmp_path / "log")
        try:
            server.wait_ready()
            body = {"model": "weft-demo", "prompt": "What is", "max_tokens": 4, "ignore_eos": True}
            answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=TIMEOUT_S).json()
            assert answer["usage"]["completion_tokens"] == 4
        finally:
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
