"""Full and read-only folders, and files that must not grow: one line says so, or serving goes on."""

import os
import pathlib
import resource
import signal
import subprocess
import sys

import httpx
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, Serve
from tests.end_to_end.test_life_and_death import complete, eventually

SPACE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
"""A place where the tests may mount what they like."""


def inside(*mounts: str) -> tuple[str, ...]:
    """A command that runs another one where these file systems are mounted."""
    return (*SPACE, f'{" && ".join(f"mount -t tmpfs {mount}" for mount in mounts)} && exec "$@"', "sh")


@pytest.fixture(scope="module", autouse=True)
def may_mount(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("mount")
    if subprocess.run([*inside(f"-o size=64k none {folder}"), "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces, in which anybody may mount")


def fill(folder: pathlib.Path) -> None:
    """Leave no room in a file system."""
    try:
        with (folder / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError as error:
        assert error.strerror == "No space left on device"


def restart(server: LiveServer, module: str) -> None:
    """Kill a child and wait until another one serves."""
    (pid,) = server.children(module)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: server.children(module) not in ([], [pid]), "another one is started")
    server.wait_ready()
    eventually(lambda: is_served(server), "it serves")


def is_served(server: LiveServer) -> bool:
    try:
        return complete(server).status_code == 200
    except httpx.TransportError:
        return False


def test_a_runtime_folder_that_fills_up_ends_nothing(serve: Serve, tmp_path: pathlib.Path) -> None:
    """The first page that found no room killed a server, or the next engine could not start."""
    folder = tmp_path / "r"
    folder.mkdir()
    server = serve(prefix=inside(f"-o size=2m none {folder}"), XDG_RUNTIME_DIR=str(folder))
    fill(pathlib.Path(f"/proc/{server.process.pid}/root/{folder}"))
    assert complete(server).status_code == 200
    restart(server, "weft.engine.process")
    restart(server, "weft.server.app.process")
    assert server.metric("weft:generation_tokens_total") >= 3
    assert "SIGBUS" not in server.log.read_text()
    assert server.stop() == 0


@pytest.mark.skipif(
    any(pathlib.Path(path).is_relative_to("/tmp") for path in (sys.prefix, __file__)),
    reason="Weft itself lies in /tmp, which is mounted over",
)
@pytest.mark.parametrize(
    ("options", "fault"), [("size=64k", "/tmp: less than 1 MiB are left"), ("ro", "/tmp: Read-only file system")]
)
def test_a_temporary_folder_without_room_is_one_line(serve: Serve, options: str, fault: str) -> None:
    """It ended in a traceback."""
    server = serve(ready=False, prefix=inside(f"-o {options} none /tmp"), XDG_RUNTIME_DIR="")
    assert server.process.wait(TIMEOUT_S) == 2
    advice = "set XDG_RUNTIME_DIR to a folder with room"
    assert server.log.read_text() == f"weft: error: no room for a runtime folder ({fault}); {advice}\n"


def test_files_that_must_not_grow_cost_no_more_than_the_crash_record(serve: Serve) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        server = serve(ready=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    server.wait_ready()
    assert is_served(server)
    log = server.log.read_text()
    assert "No room for the crash record (File too large)" in log
    assert server.get("/metrics").status_code == 200
    assert server.stop() == 0
