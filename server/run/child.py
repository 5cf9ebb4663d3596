"""One child process of the supervisor: start it, notice its end, start it again.

Owns the process and the delay before its next start: none after a long life, a growing one after early deaths. Every
child dies with the supervisor (PR_SET_PDEATHSIG). It ignores SIGINT and SIGHUP, which a terminal sends to the whole
process group: the supervisor alone decides who ends when. Its settings come on standard input, from memory, because
they contain keys. Never waits, except in `kill`.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

STEADY_S = 10.0
"""A child that lived at least this long is restarted without delay."""
MAX_RESTART_DELAY_S = 30.0

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def python_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of this package with this interpreter.

    -P keeps a folder `weft` in the current directory from shadowing the package.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def die_with_parent(signum: int) -> None:
    """Have the kernel send a signal to this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum)


class Child:
    """A child process. Only the supervisor mutates it.

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
        supervisor_pid = os.getpid()

        def prepare() -> None:  # in the child before exec; safe, since the supervisor has one thread
            die_with_parent(signal.SIGKILL)
            if os.getppid() != supervisor_pid:
                os._exit(1)  # the supervisor died before prctl
            for signum in (signal.SIGINT, signal.SIGHUP):
                signal.signal(signum, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the supervisor's mask would be inherited

        self._start_time = time.monotonic()
        try:
            with open(os.memfd_create("weft"), "w+b") as stdin:  # never on a disk, and writing never blocks
                stdin.write(self._stdin)
                stdin.seek(0)
                self._process = subprocess.Popen(
                    self._command, env=self._environment, pass_fds=self._pass_fds, stdin=stdin, preexec_fn=prepare
                )
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

    def kill(self) -> None:
        """Kill it and wait for its end, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
