"""`weft serve`: the process that starts, restarts and ends all other processes.

Owns the listening socket, the runtime folder, an engine process for each model and N server processes. Its life, in
this order:

1. It makes the runtime folder. Children read their settings, secrets included, from standard input.
2. It binds the socket. Servers inherit it, so the port stays open while a server is replaced.
3. It starts all children at once. Servers answer 503 while the engine loads.
4. It restarts every child that ends, and kills an engine that hangs. Until everything has been ready once, exit code 2
   of a child means that a start is impossible: the child has said why, and everything ends with exit code 2. The same
   holds for a child that has failed three times by then. Engines of models that are loaded on demand come and go as
   the `ModelLoader` says, and end nothing but themselves.
5. SIGUSR1 clears the record of requests that are suspected or convicted of having crashed the engine.
6. The first SIGTERM, SIGINT or SIGHUP drains: servers finish their requests and exit, then the engine is ended. Exit
   code 0. At a second signal servers cut their requests, tell their clients, and end. Exit code 1. A second signal
   within REPEAT_S does not count: `timeout` and service managers signal the process and then its group.
7. If the runtime folder is removed, running children go on, and the log says so. As soon as a child must be started,
   everything starts again in a new folder.

Signals are blocked and waited for: no handler runs between two lines, and an idle supervisor sleeps.
Imports neither torch nor the web framework. Serves no request itself.
"""

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import multiprocess

from weft.engine.wire import errors as limits
from weft.server.http.tls import certificate
from weft.server.models.fleet import ASK_SIGNAL
from weft.server.resolve import check_meeting
from weft.server.settings import Settings, engine_options
from weft.server.supervise import status_line
from weft.server.supervise.child import Child, EngineProcess
from weft.server.supervise.listening import listen, page_url
from weft.server.supervise.memory_shares import EvictionPlan, MemoryNeed, Shares, shares, with_shares
from weft.server.supervise.model_loader import ModelLoader
from weft.server.supervise.runtime_folder import METRICS_NAME, data_folder, engine_folder, is_there, runtime_folder
from weft.server.supervise.spawn import ENGINE_COMMAND, die_with_parent, python_command
from weft.server.text.template_process import processes

EXIT_FORCED = 1
EXIT_CANNOT_START = 2
DRAIN_MARGIN_S = 5.0
"""Servers end by themselves after drain_timeout_s. Those that run this much longer are killed."""

FORCED_S = 3.0
"""After a second signal: time for servers to tell their clients that requests are cut."""

MAX_START_FAILURES = 3
"""Everything ends if one child fails this often before everything was ready."""

CUT_SIGNAL = signal.SIGUSR2
"""Makes a server process cut its requests at once."""

REPEAT_S = 0.2
"""A stop signal this soon after the first one is a repetition of it."""

_POLL_S = 0.05
_LONGEST_WAIT_S = 1e6
_STOP = {signal.SIGTERM, signal.SIGINT}
# nohup ignores SIGHUP; once blocked, sigtimedwait would return it all the same.
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
    _STOP.add(signal.SIGHUP)
_FORGET = signal.SIGUSR1
_AWAITED = _STOP | {signal.SIGCHLD, _FORGET, ASK_SIGNAL}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Commands:
    """Command lines of the children. An engine's folder is appended, or the runtime folder and the socket's number."""

    engine: Sequence[str] = ENGINE_COMMAND
    server: Sequence[str] = tuple(python_command("weft.engine.start.launch", "weft.server.app.process"))
    node: Sequence[str] = tuple(python_command("weft.engine.start.launch", "weft.engine.ranks.node_process"))
    """In place of the engine on all machines but the first; they have no servers."""


class FolderLostError(Exception):
    """The runtime folder was removed, so no child can start."""


class CannotStartError(Exception):
    """A child cannot start, and trying again is of no use; the log says why."""


def ready_file(runtime_dir: Path, pid: int) -> Path:
    """The file that the server process pid makes once it accepts connections."""
    return runtime_dir / f"server.{pid}.ready"


def run(settings: Settings, commands: Commands | None = None, *, shows_status: bool = True) -> int:
    """Serve until a stop signal. Must run on the main thread of a process of its own.

    Args:
        settings: With `served_model_name` filled in, unless there are `models`, and checkpoint folders as models.
        commands: Programs to run as children; `weft batch` and tests replace them.
        shows_status: Whether a terminal gets a line with what the engine does.

    Returns:
        The exit code: 0 after a drain, 1 after a forced end, 2 when a child cannot start.

    Raises:
        StartError: The address cannot be listened on, no folder has room for the runtime folder, the data folder or the
            certificate cannot be used, the models that are always loaded do not fit together, or several machines
            cannot meet.
    """
    check_meeting(settings)
    planned = shares(settings)
    settings = with_shares(settings, planned)
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # with an inherited SIG_IGN the kernel would reap the children
    has_line = shows_status and status_line.is_wanted(settings.log_format)
    certificate(settings)  # what is wrong with it is better said once, and before a model is loaded
    with listen(settings.host, settings.port) if not settings.node_rank else contextlib.nullcontext() as listener:
        while True:
            with contextlib.ExitStack() as stack:
                runtime_dir = stack.enter_context(runtime_folder(len(settings.fleet)))
                data_dir = stack.enter_context(data_folder(settings.data_dir))
                if has_line:
                    folders = [engine_folder(runtime_dir, index) for index in range(len(settings.fleet))]
                    stack.enter_context(status_line.shown(folders))
                try:
                    told = settings.model_copy(update={"data_dir": str(data_dir)})
                    return Supervisor(told, planned, runtime_dir, listener, commands or Commands()).run()
                except FolderLostError:
                    logger.error("The runtime folder %s is gone; starting again in a new one", runtime_dir)


def run_engine(settings: Settings, owner_pid: int, tell: Callable[[Path, Path], None]) -> int:
    """Run an engine without servers until a stop signal or the end of its owner; otherwise as `run`.

    Args:
        settings: With the checkpoint's folder as `model`.
        owner_pid: The process that started this one.
        tell: Called with the runtime folder and the data folder.

    Raises:
        StartError: No folder has room for the runtime folder, or the data folder cannot be used.
        FolderLostError: The runtime folder was removed, and the engine has ended.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != owner_pid:
        return EXIT_FORCED  # it ended before that
    with runtime_folder() as runtime_dir, data_folder(settings.data_dir) as data_dir:
        tell(runtime_dir, data_dir)
        return Supervisor(settings, shares(settings), runtime_dir, None, Commands()).run()


class Supervisor:
    """The children and the loop over them."""

    def __init__(
        self, settings: Settings, planned: Shares, runtime_dir: Path, listener: socket.socket | None, commands: Commands
    ) -> None:
        """Prepare the children without starting them. _AWAITED must be blocked. Only servers need a listener."""
        self._settings = settings
        self._runtime_dir = runtime_dir
        self._listener = listener
        self._engines = {
            name: EngineProcess(
                f"{name} engine" if len(settings.fleet) > 1 else "engine",
                engine_folder(runtime_dir, index),
                commands.node if settings.node_rank else commands.engine,
                engine_options(settings.for_model(name), Path(entry.model or "")),
            )
            for index, (name, entry) in enumerate(settings.fleet.items())
        }
        needs = {name: MemoryNeed(share.memory.device, share.total_bytes) for name, share in planned.models.items()}
        room = EvictionPlan(planned.budget_bytes, needs)
        self._loader = ModelLoader(settings, runtime_dir, self._engines, room, planned.faults)
        fd = listener.fileno() if listener else -1
        command, stdin = [*commands.server, str(runtime_dir), str(fd)], settings.model_dump_json().encode()
        self._servers = [
            Child(f"server {i}", command, os.environ, (fd,), stdin)
            for i in range(settings.server_processes if listener else 0)
        ]
        engines = [engine.child for engine in self._engines.values()]
        self._children = [*engines, *self._servers]
        self._draining = engines if settings.node_rank else self._servers
        self._is_ready = False
        self._was_ready = False
        self._misses_folder = False

    def run(self) -> int:
        """Run the children until a stop signal or a failed start. Returns the exit code; no child outlives it.

        Raises:
            FolderLostError: A child must be started and the runtime folder is gone.
        """
        processes().close()  # which checked chat templates
        try:
            while True:
                self._start_due(self._children)
                signum = _wait(self._next_wait_s())
                if signum in _STOP:
                    return self._drain()
                if signum == _FORGET:
                    for engine in self._engines.values():
                        engine.forget_suspects()
                    logger.info("Told the engine to forget which requests are suspected of having ended it")
                for child in self._children:
                    if (code := child.reap()) is not None:
                        self._ended(child, code)
                for engine in self._engines.values():
                    engine.kill_if_hung()
                self._loader.look()
                self._watch_folder()
                self._watch_readiness()
        except CannotStartError:
            return EXIT_CANNOT_START
        finally:
            for child in self._servers:  # before the engines, so no server can report that they died
                child.kill()
            for engine in self._engines.values():
                engine.close()

    def _start_due(self, children: Sequence[Child]) -> None:
        """Start those children whose time has come."""
        for child in children:
            if child.due_time is not None and child.due_time <= time.monotonic():
                if not is_there(self._runtime_dir):
                    raise FolderLostError
                try:
                    child.start()
                except OSError as error:
                    if not self._loader.note_end(child, EXIT_FORCED):
                        self._failed(child, f"cannot be started ({limits.explain(error) or error})")

    def _next_wait_s(self) -> float:
        """How long to sleep if no signal comes."""
        waits = [max(child.due_time - time.monotonic(), 0.0) for child in self._children if child.due_time is not None]
        if not self._is_ready:
            waits.append(_POLL_S)
        if (wait_s := self._loader.wait_s()) is not None:
            waits.append(wait_s)
        waits += [wait_s for engine in self._engines.values() if (wait_s := engine.wait_s()) is not None]
        return min(waits, default=_LONGEST_WAIT_S)

    def _watch_folder(self) -> None:
        """Log once that the runtime folder was removed. Running children go on without it."""
        if not self._misses_folder and not is_there(self._runtime_dir):
            self._misses_folder = True
            logger.error(
                "The runtime folder %s was removed: /metrics is incomplete, and the next restart cuts all requests",
                self._runtime_dir,
            )

    def _ended(self, child: Child, code: int) -> None:
        """Tidy up after a child that has ended. Raises CannotStartError if it is not to be started again."""
        for engine in self._engines.values():
            if child is engine.child:
                engine.note_end(code)
        if self._loader.note_end(child, code):
            return
        self._is_ready = False
        if code == EXIT_CANNOT_START and not self._was_ready:
            raise CannotStartError
        self._failed(child, f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}")

    def _failed(self, child: Child, ending: str) -> None:
        """Log how a child ended. Raises CannotStartError if that was its last try."""
        if child.num_deaths >= MAX_START_FAILURES and not self._was_ready:
            message = (
                "The %s process %s, and %d times in all before it was ready: ending. What it may have run out of: %s"
            )
            logger.error(message, child.name, ending, child.num_deaths, limits.describe())
            raise CannotStartError
        delay_s = max((child.due_time or 0.0) - time.monotonic(), 0.0)
        logger.error("The %s process %s; restarting it", child.name, ending, extra={"delay_s": round(delay_s, 1)})

    def _watch_readiness(self) -> None:
        """Tidy up after dead servers, and log once everything serves."""
        pids, num_ready = {child.pid for child in self._servers}, 0
        for file in self._runtime_dir.glob("server.*.ready"):
            pid = int(file.name.split(".")[1])
            if pid in pids:
                num_ready += 1
            else:
                file.unlink()
                multiprocess.mark_process_dead(pid, str(self._runtime_dir / METRICS_NAME))  # type: ignore[no-untyped-call]
        if not self._is_ready and num_ready == len(self._servers) and self._loader.are_ready:
            self._is_ready = self._was_ready = True
            names = ", ".join(self._settings.fleet)
            if self._listener is None:
                logger.info("The engine of %s is ready", names)
                return
            scheme = "https" if self._settings.ssl_certfile else "http"
            url = page_url(self._settings.host, self._listener.getsockname()[1], scheme)
            logger.info("Serving %s: chat at %s, API at %sv1", names, url, url)

    def _drain(self) -> int:
        """Let the servers finish their requests. Returns the exit code."""
        start_time = time.monotonic()  # before the log line that invites a second signal
        if self._listener is not None:
            logger.info("Draining: new requests are refused, running ones finish; a second signal ends them")
            self._listener.close()  # the servers keep the port open until they end
        for child in self._draining:
            child.send_signal(signal.SIGTERM)
        deadline = start_time + self._settings.drain_timeout_s + DRAIN_MARGIN_S
        code = 0
        while any(child.pid is not None for child in self._draining):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                logger.error("Servers did not end in time; ending them")
                break
            if (
                _wait(min(remaining_s, self._loader.wait_s() or remaining_s)) in _STOP
                and code == 0
                and time.monotonic() - start_time >= REPEAT_S
            ):
                logger.warning("Forced to end; running requests are cut")
                code, deadline = EXIT_FORCED, time.monotonic() + FORCED_S
                for child in self._draining:
                    child.send_signal(CUT_SIGNAL)
            for child in self._draining:
                child.reap()
            self._keep_loading()
        return code

    def _keep_loading(self) -> None:
        """While servers drain: let models on demand come and go, since requests may wait for them."""
        for engine in self._engines.values():
            if (code := engine.child.reap()) is not None:
                engine.note_end(code)
                self._loader.note_end(engine.child, code)
        self._loader.look()
        with contextlib.suppress(FolderLostError, CannotStartError):
            self._start_due(self._loader.children_on_demand)


def _wait(timeout_s: float) -> int | None:
    """Sleep until one of _AWAITED arrives and return it; None after timeout_s."""
    info = signal.sigtimedwait(_AWAITED, timeout_s)
    return info.si_signo if info else None
