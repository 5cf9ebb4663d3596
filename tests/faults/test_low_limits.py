"""A machine that lets a process have too little: one line names what, and `weft serve` ends with exit code 2."""

import subprocess
import sys

import pytest

from tests.end_to_end.conftest import TIMEOUT_S, reserved_port


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("-v 500000", "address space is limited to 512 MB (ulimit -v)"),
        ("-n 12", "12 files may be open (ulimit -n)"),
        ("-n 5", "5 files may be open (ulimit -n)"),
    ],
)
def test_a_limit_that_is_too_low_is_named(limit: str, words: str) -> None:
    """Engine or server was restarted for ever, with a traceback each time."""
    with reserved_port() as port:
        serve = [sys.executable, "-m", "weft.server", "serve", "--port", str(port)]
        command = ["/bin/sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *serve]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2
    assert sum(words in line for line in done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
