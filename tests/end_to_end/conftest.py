"""`weft serve` as a user starts it, on a free port, with its log at hand."""

import contextlib
import os
import pathlib
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

if TYPE_CHECKING:  # what needs no browser does not wait for it
    from playwright.sync_api import Browser, Page

    from tests.end_to_end.browser import Open, Tab


@dataclass
class LiveServer:
    """A running `weft serve`."""

    process: subprocess.Popen[bytes]
    port: int
    log: pathlib.Path

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.base_url}/ready").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.log.read_text()}")

    def children(self, module: str) -> list[int]:
        """Process ids of the children that run a module."""
        return children_of(self.process.pid, module)

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = httpx.get(f"{self.base_url}/metrics", timeout=60).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert values, f"{name} is not exported"
        return sum(values)

    def wait_for_metric(self, name: str, value: float, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.02)

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 40.0) -> int:
        """Send a signal if it still runs, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.process.wait(timeout_s)


def children_of(parent: int, module: str) -> list[int]:
    """Process ids of the children of process `parent` that run a module."""
    pids = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in pids if module.encode() in _command(pid)]


def _command(pid: str) -> list[bytes]:
    """A process's arguments; none if it ended after it was listed."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


@contextlib.contextmanager
def serving(log: pathlib.Path, *arguments: str, ready: bool = True, **environment: str) -> Iterator[LiveServer]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), *arguments]
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
    for _ in range(2):
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


Serve = Callable[..., LiveServer]


@pytest.fixture
def serve(tmp_path: pathlib.Path) -> Iterator[Serve]:
    """Starts servers that end with the test: `serve("--flag", "value", WEFT_SETTING="value")`."""
    with contextlib.ExitStack() as stack:
        count = iter(range(100))

        def start(*arguments: str, ready: bool = True, **environment: str) -> LiveServer:
            log = tmp_path / f"server-{next(count)}.log"
            return stack.enter_context(serving(log, *arguments, ready=ready, **environment))

        yield start


@pytest.fixture(scope="session")
def live_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The demo model in float32, shared by all tests that leave it as they found it."""
    log = tmp_path_factory.mktemp("live") / "server.log"
    with serving(log, "--dtype", "float32") as server:
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
