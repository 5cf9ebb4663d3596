"""One child process that is to run: start it, see it end, start it again.

Owns the process and the pause before its next start: none after a long life, a growing one when it dies within
seconds. Every child dies with the supervisor (PR_SET_PDEATHSIG) and ignores SIGINT and SIGHUP, which a terminal sends
to the whole process group: who ends when is the supervisor's decision. What a child is told comes on its standard
input, from memory, since keys are among it. Never waits.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

STEADY_S = 10.0
"""A child that lived at least this long is restarted at once."""
MAX_RESTART_DELAY_S = 30.0

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def python_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of this package with this interpreter.

    With -P: a folder `weft` where the user happens to be, such as a checkout, must not take the package's place.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


class Child:
    """A child process; the supervisor alone mutates it.

    Attributes:
        due_time: When to start it (monotonic); None while it runs.
        num_deaths: How often it has ended by itself or could not be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: tuple[int, ...] = (),
        stdin: bytes = b"",
    ) -> None:
        """Take note of what to run; it is due at once, pass_fds stay open in it, and it can read stdin to its end."""
        self.name = name
        self.due_time: float | None = 0.0
        self._command = command
        self._environment = environment
        self._pass_fds = pass_fds
        self._stdin = stdin
        self._process: subprocess.Popen[bytes] | None = None  # None: not running
        self.num_deaths = 0
        self._start_time = 0.0
        self._num_early_deaths = 0

    @property
    def pid(self) -> int | None:
        """Its process id; None while it does not run."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it; it must not be running.

        Raises:
            OSError: The machine lets no further process start; that counts as an early death.
        """
        assert self._process is None
        supervisor_pid = os.getpid()

        def prepare() -> None:  # in the child, before exec; the supervisor has one thread, so this is safe
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor_pid:
                os._exit(1)  # the supervisor died before prctl
            for signum in (signal.SIGINT, signal.SIGHUP):
                signal.signal(signum, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the supervisor's mask would be inherited

        self._start_time = time.monotonic()
        try:
            with open(os.memfd_create("weft"), "w+b") as stdin:  # never on a disk, never in the way of who writes it
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
        """The exit code if it has just ended (minus the signal that killed it), else None. Sets `due_time`."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._process = None
        self._note_death()
        return code

    def _note_death(self) -> None:
        self.num_deaths += 1
        now = time.monotonic()
        is_early = now - self._start_time < STEADY_S
        self._num_early_deaths = self._num_early_deaths + 1 if is_early else 0
        self.due_time = now + self._restart_delay_s()

    def send_signal(self, signum: int) -> None:
        """Send a signal if it runs."""
        if self._process is not None:
            self._process.send_signal(signum)

    def kill(self) -> None:
        """End it now and wait for that; nothing happens if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _restart_delay_s(self) -> float:
        """0 after the first early death, then 0.5, 1, 2 .. seconds."""
        if self._num_early_deaths < 2:
            return 0.0
        return min(0.5 * 2.0 ** (self._num_early_deaths - 2), MAX_RESTART_DELAY_S)
