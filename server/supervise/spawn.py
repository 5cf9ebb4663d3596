"""Starts the supervisor's children: tied to its life, their settings on standard input; an engine even ahead of time.

A child dies with the supervisor (PR_SET_PDEATHSIG). It ignores SIGINT and SIGHUP, which a terminal sends to the whole
process group: the supervisor alone decides who ends when. Its settings come from memory, because they contain keys.

Until `weft serve` knows what its engine shall do, a third of a second goes by; then the engine imports torch, which
takes twice as long. So `__main__` starts an engine first of all (`start_ahead`), which imports and then waits to be
told its arguments and its standard streams. The first child to be started takes it over. If that is no engine, it ends.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def python_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of this package with this interpreter.

    -P keeps a folder `weft` in the current directory from shadowing the package.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


ENGINE_COMMAND = tuple(python_command("weft.engine.start.launch", "weft.engine.process"))
ENGINE_ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=2000000000:glibc.malloc.trim_threshold=4000000000",
    "OMP_WAIT_POLICY": "passive",
}
"""The user's own values win.

glibc keeps the memory of one step for the next: fresh pages took a third of the time of a prefill on the CPU. Torch's
threads sleep until all are done: while one of them spins, another may wait for its core.
"""


def die_with_parent(signum: int) -> None:
    """Have the kernel send a signal to this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """An engine that waits for its arguments at the other end of a socket."""

    process: subprocess.Popen[bytes]
    environment: Mapping[str, str]
    link: socket.socket


_ahead: _Ahead | None = None


def start_ahead() -> None:
    """Start an engine that waits. Without room for another process nothing happens: `spawn` will say it."""
    global _ahead
    environment = ENGINE_ENVIRONMENT | os.environ
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [*ENGINE_COMMAND, "--when-told", str(theirs.fileno())]
    with theirs:
        try:
            process = _popen(command, environment, (theirs.fileno(),), subprocess.DEVNULL)
        except OSError:
            ours.close()
        else:
            _ahead = _Ahead(process, environment, ours)


def spawn(
    command: Sequence[str], environment: Mapping[str, str], pass_fds: tuple[int, ...] = (), stdin: bytes = b""
) -> subprocess.Popen[bytes]:
    """Start a process in which `pass_fds` stay open, and which reads `stdin` to its end.

    Raises:
        OSError: The machine cannot start another process.
    """
    with open(os.memfd_create("weft"), "w+b") as file:  # never on a disk, and writing never blocks
        file.write(stdin)
        file.seek(0)
        return _take_over(command, environment, file.fileno()) or _popen(command, environment, pass_fds, file.fileno())


def _take_over(command: Sequence[str], environment: Mapping[str, str], stdin: int) -> subprocess.Popen[bytes] | None:
    """Give the command's arguments to the engine that waits; None, and the end of it, if there is none for them."""
    global _ahead
    if _ahead is None:
        return None
    process, link, known = _ahead.process, _ahead.link, _ahead.environment
    _ahead = None
    num_known = len(ENGINE_COMMAND)
    with link:
        if tuple(command[:num_known]) == ENGINE_COMMAND and environment == known and process.poll() is None:
            with contextlib.suppress(OSError):  # it has just ended
                socket.send_fds(link, [json.dumps(command[num_known:]).encode()], [stdin, 1, 2])
                return process
    process.kill()
    process.wait()
    return None


def _popen(
    command: Sequence[str], environment: Mapping[str, str], pass_fds: tuple[int, ...], stdin: int
) -> subprocess.Popen[bytes]:
    parent_pid = os.getpid()

    def prepare() -> None:  # in the child before exec; safe, since the supervisor has one thread
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)  # the supervisor died before prctl
        for signum in (signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the supervisor's mask would be inherited

    return subprocess.Popen(command, env=environment, pass_fds=pass_fds, stdin=stdin, preexec_fn=prepare)
