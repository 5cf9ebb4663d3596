"""A server process, started by the supervisor: `python -m weft.server.app.process RUNTIME_DIR LISTEN_FD`.

Owns the event loop, uvicorn on the inherited socket, the connections to the engines, and the drain:

- At SIGTERM it refuses new requests (the app reads `Lifecycle.draining`) and those whose body is incomplete. Running
  requests go on. Those that still run after drain_timeout_s lose their engine, and their clients are told. Then the
  process exits with 0.
- A second SIGTERM changes nothing: service managers signal every process of a group, so it arrives twice.
- At CUT_SIGNAL, which the supervisor sends when it is forced to end, requests are cut at once.

Exit code 2: the checkpoint's tokenizer cannot be read.
"""

import asyncio
import contextlib
import logging
import os
import pathlib
import signal
import socket
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial

import anyio
import uvicorn
import uvloop
from typing_extensions import override

from weft.engine.wire import errors as logs
from weft.engine.wire.machine import collect_rarely
from weft.server.app.app import connected_models, create_app, load_tokenizers
from weft.server.http.limits import Connections, Lifecycle, raise_file_limit
from weft.server.http.metrics import share_metrics
from weft.server.http.protocol import LINGER_S, WeftProtocol
from weft.server.http.tls import certificate
from weft.server.models.engine_client import SocketEngineClient
from weft.server.settings import Settings
from weft.server.supervise.runtime_folder import METRICS_NAME
from weft.server.supervise.supervisor import CUT_SIGNAL, EXIT_CANNOT_START, ready_file
from weft.server.text.tokenizer import Tokenizer, TokenizerError

KEEP_ALIVE_S = 65
"""Longer than the idle timeout of most clients and load balancers, so that they close a connection first."""
CUT_S = 1
"""Seconds in which clients are told that their requests are cut."""

logger = logging.getLogger("weft.server.app.process")


def main(runtime_dir: pathlib.Path, listen_fd: int) -> int:
    """Serve with the settings on standard input until SIGTERM; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal signals the whole group; the supervisor decides
    settings = Settings.model_validate_json(sys.stdin.buffer.read())
    with open(os.devnull, "rb") as nothing:  # close the file with the keys: /proc shows it while it is open
        os.dup2(nothing.fileno(), 0)
    logs.configure(settings.log_format, "server")
    try:
        tokenizers = load_tokenizers(settings)
    except TokenizerError as error:
        print(f"weft: error: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    share_metrics(runtime_dir / METRICS_NAME)
    listener = socket.socket(fileno=listen_fd)
    uvloop.run(_serve(settings, tokenizers, runtime_dir, listener))
    return 0


async def _serve(
    settings: Settings, tokenizers: Mapping[str, Tokenizer], runtime_dir: pathlib.Path, listener: socket.socket
) -> None:
    async with connected_models(settings, tokenizers, runtime_dir) as (served, fleet, engine_clients):
        app = create_app(served, settings, fleet)
        connections = Connections(settings, raise_file_limit())
        server = HttpServer(app, connections, on_started=ready_file(runtime_dir, os.getpid()).touch)
        drain = Drain(server, app.state.lifecycle, engine_clients, settings.drain_timeout_s)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, drain.on_signal)
        asyncio.get_running_loop().add_signal_handler(CUT_SIGNAL, drain.on_cut)
        await server.serve(sockets=[listener])


class HttpServer(uvicorn.Server):
    """uvicorn that tells when it accepts connections, and leaves signals alone.

    uvicorn's own handler would stop at the first signal, and sse-starlette ends every stream once that handler has run.
    Here only `should_exit` stops it, after the last request.
    """

    def __init__(self, app: Callable[..., object], connections: Connections, on_started: Callable[[], None]) -> None:
        """Configure uvicorn for app; on_started is called once connections are accepted."""
        tls = certificate(connections.settings)
        self._handshake_s = connections.settings.header_timeout_s if tls else None
        super().__init__(
            uvicorn.Config(
                app,
                ssl_context_factory=(lambda _config, _default: tls.context) if tls else None,
                http=partial(WeftProtocol, connections=connections),  # type: ignore[arg-type]  # uvicorn only calls it
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CUT_S,
            )
        )
        self._on_started = on_started

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._handshake_s is not None:  # uvicorn has no argument for it, and the loop would wait a minute
            loop = asyncio.get_running_loop()
            times = {"ssl_handshake_timeout": self._handshake_s, "ssl_shutdown_timeout": LINGER_S}
            loop.create_server = partial(loop.create_server, **times)  # type: ignore[method-assign]
        await super().startup(sockets)
        anyio.Lock()  # loads anyio's backend, for which the first stream would wait 5 ms
        collect_rarely()
        self._on_started()

    def stop_receiving(self) -> None:
        """Refuse requests whose body is incomplete."""
        for connection in list(self.server_state.connections):
            assert isinstance(connection, WeftProtocol)
            connection.stop_receiving()

    @contextlib.contextmanager
    @override
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Drain:
    """How a server process ends. Lives on its event loop."""

    def __init__(
        self, server: HttpServer, lifecycle: Lifecycle, engine_clients: Sequence[SocketEngineClient], timeout_s: float
    ) -> None:
        self._server = server
        self._lifecycle = lifecycle
        self._engine_clients = engine_clients
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None  # None: not draining

    def on_signal(self) -> None:
        """Refuse new requests and wait for the others. Only the first signal counts."""
        if self._task is None:
            self._begin(self._timeout_s)

    def on_cut(self) -> None:
        """Cut the requests that still run."""
        if self._task is not None:
            self._task.cancel()
        self._begin(0.0)

    def _begin(self, timeout_s: float) -> None:
        self._lifecycle.draining = True
        self._task = asyncio.create_task(self._finish(timeout_s))
        self._server.stop_receiving()

    async def _finish(self, timeout_s: float) -> None:
        if not await self._lifecycle.wait_idle(timeout_s):
            num_cut = self._lifecycle.num_active
            logger.warning("Cutting requests that did not finish in time", extra={"num_requests": num_cut})
            self._lifecycle.cut()
            await asyncio.gather(*(client.disconnect() for client in self._engine_clients))
            await self._lifecycle.wait_idle(CUT_S)
        self._server.should_exit = True


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), int(sys.argv[2])))
