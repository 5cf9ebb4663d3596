"""A real engine of the demo model, and the process that owns it."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from weft.server.ray import engine_owner
from weft.server.ray.engine_owner import EngineError, EngineOwner
from weft.server.settings import Settings
from weft.server.supervise.checkpoint import DEMO_MODEL

TIMEOUT_S = 300.0
OWNER = """
import asyncio
from tests.server.ray.test_engine_owner import SETTINGS
from weft.server.ray.engine_owner import EngineOwner

async def own():
    await EngineOwner(SETTINGS).start()
    print("ready", flush=True)
    await asyncio.sleep(1e6)

asyncio.run(own())
"""
SETTINGS = Settings(model=str(DEMO_MODEL), served_model_name=("m",), kv_cache_memory=32 << 20)


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where runtime and data folders are made."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def engines(folder: pathlib.Path) -> list[int]:
    """Process ids of engines and supervisors whose runtime folder is in the folder."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            has_it = f"XDG_RUNTIME_DIR={folder}\0".encode() in (process / "environ").read_bytes()
            if has_it and b"weft.engine.process" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:  # it ended, or is another user's
            continue
    return found


def eventually(claim: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not claim():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_an_engine_that_is_killed_comes_back(folder: pathlib.Path) -> None:
    async def run() -> None:
        owner = EngineOwner(SETTINGS)
        client, data_dir = await owner.start()
        first = client.status().epoch_id
        assert pathlib.Path(data_dir).is_dir()
        os.kill(engines(folder)[0], signal.SIGKILL)
        while owner.is_alive:
            await asyncio.sleep(0.01)
        await owner.wait_alive(TIMEOUT_S)
        owner.check()  # one restart is no reason to replace the replica
        assert client.status().epoch_id != first
        await owner.stop()
        await client.disconnect()
        assert (engines(folder), list(folder.glob("weft-*"))) == ([], [])

    asyncio.run(run())


def test_nothing_outlives_an_owner_that_is_killed(folder: pathlib.Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert engines(folder)
        assert list(folder.glob("weft-*"))
        process.kill()
    eventually(lambda: not engines(folder), "the engine is still there")
    eventually(lambda: not list(folder.glob("weft-*")), "folders are left")


def test_an_engine_that_cannot_start_says_why(folder: pathlib.Path) -> None:
    async def run() -> None:
        owner = EngineOwner(SETTINGS.model_copy(update={"kv_cache_memory": 1}))
        with pytest.raises(EngineError) as caught:
            await owner.start()
        assert "no memory is left for the KV cache: 1 B" in str(caught.value)
        assert list(folder.glob("weft-*")) == []

    asyncio.run(run())


def test_what_is_no_utf_8_in_the_log_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.stdin.read(); sys.stderr.buffer.write(b'no \\xff\\nreason\\n'); sys.exit(2)"
    monkeypatch.setattr(engine_owner, "python_command", lambda module: [sys.executable, "-c", code])
    with pytest.raises(EngineError, match=r"\(exit code 2\): no \ufffd\nreason$"):
        asyncio.run(EngineOwner(SETTINGS).start())


def test_an_engine_that_stays_away_is_reported(folder: pathlib.Path) -> None:
    async def run() -> None:
        owner = EngineOwner(SETTINGS)
        client, _ = await owner.start()
        assert owner.patience_s >= engine_owner.MIN_PATIENCE_S
        owner.patience_s = 0.0
        pid = engines(folder)[0]
        parent = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGSTOP)  # starts no other
        os.kill(pid, signal.SIGKILL)
        while owner.is_alive:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="has been away for"):
            owner.check()
        os.kill(parent, signal.SIGKILL)
        while True:
            try:
                owner.check()
            except EngineError as error:
                if "exit code -9" in str(error):
                    break
            await asyncio.sleep(0.01)
        await owner.stop()
        await client.disconnect()

    asyncio.run(run())
