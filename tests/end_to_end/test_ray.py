"""`weft ray deploy` on a Ray of its own: one replica, one stream, and nothing left behind."""

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import httpx

from tests.end_to_end.conftest import TIMEOUT_S, reserved_port


def left_behind(mark: bytes) -> list[str]:
    """Command lines of processes with the mark in their environment."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it ended, or is another user's
            continue
    return found


def eventually(claim: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not claim():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def test_a_replica_streams_and_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    runtime = tmp_path / "run"
    runtime.mkdir()
    environment = {
        "HOME": str(tmp_path),  # where Ray makes its token
        "XDG_RUNTIME_DIR": str(runtime),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_TMPDIR": "/tmp",
    }
    with reserved_port() as port, log.open("wb") as output:
        command = [sys.executable, "-P", "-m", "weft.server", "ray", "deploy", "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--kv-cache-memory", "64MB"], stdout=output, stderr=output, env=os.environ | environment
        )
        try:
            eventually(lambda: b"Serving" in log.read_bytes() or process.poll() is not None, log.read_text)
            assert process.poll() is None, log.read_text()
            body = {"model": "weft-demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
            with httpx.stream(
                "POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=TIMEOUT_S
            ) as reply:
                events = list(reply.iter_lines())
            assert reply.status_code == 200
            assert events[-2] == "data: [DONE]", events
            assert len(events) > 8
        finally:
            process.terminate()
            code = process.wait(TIMEOUT_S)
    assert code == 0, log.read_text()
    mark = f"XDG_RUNTIME_DIR={runtime}\0".encode()
    eventually(lambda: not left_behind(mark), lambda: str(left_behind(mark)))
    assert list(runtime.iterdir()) == []
