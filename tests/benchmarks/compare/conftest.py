"""A fake server, as the benchmark starts servers."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.compare.servers import Server

FAKE_SERVER = Path(__file__).with_name("fake_server.py")


@pytest.fixture
def fake() -> Callable[..., Server]:
    """Makes servers that run fake_server.py with these flags, for the models "main" and "tiny"."""

    def make(*flags: str, name: str = "Fake") -> Server:
        command = (sys.executable, str(FAKE_SERVER), "{port}", *flags)
        return Server(name, command, {"main": Path("main"), "tiny": Path("tiny")}, "/ready")

    return make
