"""Child processes of the supervisor: starts one, notices its end or that an engine hangs, and starts it again.

An engine is a child with a folder and a status page, by which a watchdog judges it. Nothing
here waits, except `kill` and `close`.
"""

import logging
import os
import pathlib
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from weft.engine.wire import messages as wire
from weft.engine.wire.status_page import Status, StatusPage
from weft.server.supervise.spawn import ENGINE_ENVIRONMENT, spawn
from weft.server.supervise.watchdog import Watchdog, hindrance

logger = logging.getLogger(__name__)

STEADY_S = 10.0
"""A child that lived at least this long is restarted without delay."""
MAX_RESTART_DELAY_S = 30.0


class Child:
    """A child process. Only the supervisor mutates it.

    Owns the process and the delay before its next start: none after a long life, a growing one after early deaths.

    Attributes:
        due_time: When to start it (monotonic); None while it runs.
        num_deaths: How often it has ended by itself or failed to start.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: tuple[int, ...] = (),
        stdin: bytes = b"",
    ) -> None:
        """Note what to run; it is due at once. `pass_fds` stay open in it, and it reads `stdin` to its end."""
        self.name = name
        self.due_time: float | None = 0.0
        self.num_deaths = 0
        self._command = command
        self._environment = environment
        self._pass_fds = pass_fds
        self._stdin = stdin
        self._process: subprocess.Popen[bytes] | None = None  # None: not running
        self._start_time = 0.0
        self._num_early_deaths = 0

    @property
    def pid(self) -> int | None:
        """Its process id; None: it does not run."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it; it must not be running.

        Raises:
            OSError: The machine cannot start another process. Counts as an early death.
        """
        assert self._process is None
        self._start_time = time.monotonic()
        try:
            self._process = spawn(self._command, self._environment, self._pass_fds, self._stdin)
        except OSError:
            self._note_death()
            raise
        self.due_time = None

    def reap(self) -> int | None:
        """The exit code, or minus the signal that killed it, if it has ended since the last call. Sets `due_time`."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._process = None
        self._note_death()
        return code

    def _note_death(self) -> None:
        """Set the next start: after the first early death at once, then after 0.5, 1, 2 ... seconds."""
        now = time.monotonic()
        self.num_deaths += 1
        self._num_early_deaths = self._num_early_deaths + 1 if now - self._start_time < STEADY_S else 0
        delay_s = 0.5 * 2.0 ** min(self._num_early_deaths - 2, 10) if self._num_early_deaths > 1 else 0.0
        self.due_time = now + min(delay_s, MAX_RESTART_DELAY_S)

    def send_signal(self, signum: int) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(signum)

    def rest(self) -> None:
        """Do not start it again, until `due_time` is set. Its earlier deaths no longer count."""
        self.due_time = None
        self.num_deaths = self._num_early_deaths = 0

    def kill(self) -> None:
        """Kill it and wait for its end, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class EngineProcess:
    """One engine process: the child, its folder and its status page. Only the supervisor mutates it.

    Owns what is to be done when an engine hangs or has ended. Its page outlives it, and must not say that it serves.
    A kill from outside must not be blamed on a request.

    Attributes:
        child: The process, which the supervisor starts and reaps.
    """

    def __init__(self, label: str, folder: pathlib.Path, command: Sequence[str], options: wire.EngineOptions) -> None:
        """Prepare it without starting it. The folder has a status page."""
        stdin = msgspec.json.encode(options)
        self.child = Child(label, [*command, str(folder)], ENGINE_ENVIRONMENT | os.environ, stdin=stdin)
        self._folder = folder
        self._page = StatusPage(folder / wire.STATUS_NAME)
        self._watchdog = Watchdog(self._page, lambda: hindrance(self.child.pid))
        self._has_killed = False  # True: killed, and not reaped yet

    @property
    def status(self) -> Status:
        """The latest reading of its page."""
        return self._page.read()

    def wait_s(self) -> float | None:
        """Seconds in which it cannot be found hanging; None: for ever."""
        return None if self._has_killed else self._watchdog.wait_s()

    def kill_if_hung(self) -> None:
        """Kill it if it gives no sign of life."""
        if self._has_killed or (status := self._watchdog.hung()) is None:
            return
        self._has_killed = True
        logger.error(
            "The %s hangs: no sign of life for %.0f s, with %d requests running and %d waiting; killing it",
            self.child.name,
            time.monotonic() - status.progress_time,
            status.num_requests_running,
            status.num_requests_waiting,
        )
        self.child.send_signal(signal.SIGKILL)

    def note_end(self, code: int) -> None:
        """Tidy up after a process that ended with this code, or minus the signal that killed it."""
        gone = ("is_ready", "stall_time", "has_work", "num_requests_running", "num_requests_waiting", "num_used_blocks")
        self._page.write(replace(self.status, **dict.fromkeys(gone, 0)))  # nothing is served until the next one writes
        if code == -signal.SIGKILL and not self._has_killed:  # for example by the out-of-memory killer
            (self._folder / wire.STEP_NAME).unlink(missing_ok=True)  # no request is to blame
        self._has_killed = False

    def forget_suspects(self) -> None:
        """Clear the record of requests that are suspected or convicted of having crashed it."""
        (self._folder / wire.SUSPECTS_NAME).unlink(missing_ok=True)

    def leave(self) -> None:
        """Let it end once it has answered what it has accepted; one that cannot be told ends at once."""
        try:
            with socket.socket(socket.AF_UNIX) as link:
                link.setblocking(False)
                link.connect(str(self._folder / wire.SOCKET_NAME))
                link.send(wire.encode(wire.Leave()))
        except OSError:
            self.child.send_signal(signal.SIGKILL)

    def rest(self) -> None:
        """After its end: do not start it again, and show that there is no engine."""
        self.child.rest()
        self._page.write(Status())

    def take_fault(self) -> str:
        """Why it could not load its model; empty if it did not say so."""
        try:
            return (self._folder / wire.FAULT_NAME).read_text()
        except OSError:
            return ""
        finally:
            (self._folder / wire.FAULT_NAME).unlink(missing_ok=True)

    def close(self) -> None:
        """Kill it and wait for its end, if it runs."""
        self.child.kill()
        self._page.close()
