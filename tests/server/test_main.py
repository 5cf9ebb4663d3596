"""The first moments of the `weft` command, while its modules are still being imported."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

TIMEOUT_S = 120.0
"""Of what is waited for; only a failure takes so long."""

HANG = """
import pathlib, time
pathlib.Path({file!r}).touch()
while True:
    time.sleep(0.01)
"""


def start_and_hang(folder: pathlib.Path, *arguments: str) -> subprocess.Popen[str]:
    """The command, which stops in the middle of its imports."""
    reached = folder / "reached"
    (folder / "typer.py").write_text(HANG.format(file=str(reached)))
    process = subprocess.Popen(
        [sys.executable, "-m", "weft.server", *arguments],
        env={"PYTHONPATH": f"{folder}:{pathlib.Path(__file__).parents[2]}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + TIMEOUT_S
    while not reached.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(("command", "is_serve"), [("serve", True), ("plan", False)])
def test_a_stop_signal_while_importing_is_an_orderly_end(
    tmp_path: pathlib.Path, command: str, is_serve: bool, signum: signal.Signals
) -> None:
    """Ctrl-C printed a traceback, and SIGTERM ended `weft serve` with -15."""
    process = start_and_hang(tmp_path, command)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (0 if is_serve else 128 + signum, "")


def test_keys_do_not_stand_in_the_list_of_processes(tmp_path: pathlib.Path) -> None:
    process = start_and_hang(
        tmp_path, "serve", "--api-key", "secret", "--api-key=hidden", "--api-key", "--api-key", "m"
    )
    shown = pathlib.Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
    process.kill()
    process.communicate()
    assert shown[4:] == ["--api-key", "******", "--api-key=******", "--api-key", "*********", "m", ""]
