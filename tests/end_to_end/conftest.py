"""`weft serve` as a user starts it, on a free port, with its log at hand."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest

from weft.server.supervise.checkpoint import DEMO_MODEL

if TYPE_CHECKING:  # what needs no browser does not wait for it
    from playwright.sync_api import Browser, Page

    from tests.end_to_end.browser import Open, Tab


TIMEOUT_S = 500.0
"""Of what is waited for; only a failure takes so long."""

LONG_CONTEXT = 98_304
"""Tokens: a request that may fill it outlasts any test, also on a fast machine."""


ENGINE, SERVER = "weft.engine.process", "weft.server.app.process"
"""Modules that the children of `weft serve` run."""


@dataclass
class LiveServer:
    """A running `weft serve`."""

    process: subprocess.Popen[bytes]
    port: int
    log: pathlib.Path

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.base_url}/ready").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {TIMEOUT_S} s:\n{self.log.read_text()}")

    def children(self, module: str) -> list[int]:
        """Process ids of the children that run a module."""
        pids = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in pids if module.encode() in _command(pid)]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.base_url}{path}", timeout=TIMEOUT_S)

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = self.get("/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert values, f"{name} is not exported"
        return sum(values)

    def wait_for_metric(self, name: str, value: float) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.02)

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Send a signal if it still runs, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.process.wait(TIMEOUT_S)


def _command(pid: str) -> list[bytes]:
    """A process's arguments; none if it ended after it was listed."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port for a server: it may listen there, and no connection to another server is given the number meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextlib.contextmanager
def serving(
    log: pathlib.Path, *arguments: str, ready: bool = True, prefix: tuple[str, ...] = (), **environment: str
) -> Iterator[LiveServer]:
    """A server until the end of the context; prefix is a command that runs it."""
    with reserved_port() as port:
        command = [*prefix, sys.executable, "-m", "weft.server", "serve", "--port", str(port), *arguments]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | environment, start_new_session=True
            )
        server = LiveServer(process, port, log)
        try:
            if ready:
                server.wait_ready()
            yield server
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Drain, then force, so that the runtime directory goes as well; kill only what does not listen."""
    for patience_s in (1.0, 20.0):
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


Serve = Callable[..., LiveServer]


@pytest.fixture
def serve(tmp_path: pathlib.Path) -> Iterator[Serve]:
    """Starts servers that end with the test: `serve("--flag", "value", WEFT_SETTING="value")`."""
    with contextlib.ExitStack() as stack:
        count = iter(range(100))

        def start(*arguments: str, ready: bool = True, prefix: tuple[str, ...] = (), **environment: str) -> LiveServer:
            log = tmp_path / f"server-{next(count)}.log"
            return stack.enter_context(serving(log, *arguments, ready=ready, prefix=prefix, **environment))

        yield start


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model under its own name, with a context of `LONG_CONTEXT` tokens."""
    folder = pathlib.Path(shutil.copytree(DEMO_MODEL, tmp_path_factory.mktemp("long") / "weft-demo"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG_CONTEXT}))
    return str(folder)


@pytest.fixture(scope="session")
def live_server(tmp_path_factory: pytest.TempPathFactory, long_model: str) -> Iterator[LiveServer]:
    """The demo model in float32 with a long context, shared by all tests that leave it as they found it."""
    log = tmp_path_factory.mktemp("live") / "server.log"
    with serving(log, long_model, "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """Not for the session: while the driver runs, its event loop does, and no test may start one of its own."""
    from tests.end_to_end.browser import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser: "Browser") -> Iterator["Open"]:
    """Opens pages with a storage of their own."""
    from tests.end_to_end.browser import pages

    with pages(browser) as opener:
        yield opener


@pytest.fixture(scope="module")
def tab(browser: "Browser") -> Iterator["Tab"]:
    """Shared by the tests of a module, which saves most of the time that a page takes to open."""
    from tests.end_to_end.browser import Tab

    tab = Tab(browser)
    yield tab
    tab.context.close()


@pytest.fixture
def page(tab: "Tab", live_server: LiveServer) -> Iterator["Page"]:
    """The chat page, as somebody sees it who has never been there."""
    yield tab.open(live_server.base_url)
    tab.forget(live_server.base_url)
    tab.check()
