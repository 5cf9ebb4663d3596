"""Child processes of the supervisor: starts one, notices its end or that an engine hangs, and starts it again.

An engine is a child with a folder and a status page, by which a watchdog judges it. Nothing here waits, except `kill`
and `close`.

The status page says until when the engine means to give its next sign of life. It cannot give one within a step, and on
a busy machine a step takes many times as long as predicted. So an engine whose time is over is looked at for as long as
its threads wait for a core or for the disk, within a bound. Whoever is stopped or waits for a lock waits for neither.
The engine itself could not judge this: whatever thread it has for it would wait for a core, too.
"""

import logging
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from weft.engine.wire import messages as wire
from weft.engine.wire.status_page import Status, StatusPage
from weft.server.supervise.spawn import ENGINE_ENVIRONMENT, spawn

logger = logging.getLogger(__name__)

_OVERSLEPT_S = 1.0
"""Waking up this much too late means that this process was stopped."""

_LOOK_S = 1.0
"""How long a look at an engine whose time is over takes."""

_HINDERED = 0.2
"""An engine whose threads together waited for a core for this share of a look is hindered."""

_MOST = 10.0
"""A silence may be so many times as long as announced. A thread that spins for ever waits for a core as well."""


@dataclass(frozen=True, slots=True)
class Hindrance:
    """What keeps a process from running.

    Attributes:
        waited_s: How long all of its threads have been ready to run and waited for a core so far.
        is_reading: Whether one of them waits for the disk at this moment.
    """

    waited_s: float = 0.0
    is_reading: bool = False


def hindrance(pid: int | None, proc: Path = Path("/proc")) -> Hindrance:
    """What the kernel counts of a process, see proc(5) and sched-stats; nothing where it counts nothing."""
    waited_ns, is_reading = 0, False
    try:
        tasks = list((proc / str(pid) / "task").iterdir())
    except OSError:  # it has ended
        return Hindrance()
    for task in tasks:
        try:
            is_reading |= (task / "stat").read_bytes().rpartition(b") ")[2].startswith(b"D")
            waited_ns += int((task / "schedstat").read_bytes().split()[1])
        except (OSError, IndexError):  # the thread has ended, or nothing is counted
            continue
    return Hindrance(waited_ns / 1e9, is_reading)


class Watchdog:
    """Judges an engine by its status page; kills nobody.

    If the supervisor itself was stopped, probably everything was (Ctrl-Z, a frozen container, a debugger), and an old
    page proves nothing: the engine then gets its whole time again. The supervisor calls `wait_s` before it sleeps and
    `hung` after it wakes. Times are monotonic.
    """

    def __init__(
        self, page: StatusPage, hindrance: Callable[[], Hindrance], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take the page of the engine, and what keeps it from running."""
        self._page = page
        self._hindrance = hindrance
        self._clock = clock
        self._due_time = math.inf  # when to look again
        self._woken_time = -math.inf  # when this process last woke much too late
        self._looked = -math.inf, Hindrance()  # when the last look began, and what was counted by then

    def wait_s(self) -> float | None:
        """Seconds in which the engine cannot be found hanging; None: there is no engine, or it is loading."""
        self._due_time = self._deadline(self._page.read())
        return max(self._due_time - self._clock(), 0.0) if self._due_time < math.inf else None

    def hung(self) -> Status | None:
        """The status of an engine that hangs; None if it does not, or is to be looked at for longer."""
        now = self._clock()
        if now - self._due_time > _OVERSLEPT_S:
            self._woken_time = now
        status = self._page.read()
        if now < self._deadline(status):
            return None
        (began, before), counted = self._looked, self._hindrance()
        self._looked = now, counted
        is_first = began < max(status.progress_time, self._woken_time)
        is_hindered = counted.is_reading or counted.waited_s - before.waited_s >= _HINDERED * (now - began)
        latest = max(status.progress_time, self._woken_time) + _MOST * (status.stall_time - status.progress_time)
        if now >= latest or not (is_first or is_hindered):
            return status
        self._page.put_off(now + _LOOK_S)
        return None

    def _deadline(self, status: Status) -> float:
        if not status.stall_time:
            return math.inf
        return max(status.stall_time, status.put_off_time, self._woken_time + status.stall_time - status.progress_time)


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

    def __init__(self, label: str, folder: Path, command: Sequence[str], options: wire.EngineOptions) -> None:
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
