"""The entry of the `weft` command: does what cannot wait for the slow imports, and begins those of the engine.

From the first moment a stop signal ends the process cleanly: with 0 for `weft serve`, which serves nothing yet, and
with 128 + signal for the others. The supervisor replaces these handlers. API keys on the command line are hidden at
once.
"""

import os
import pathlib
import signal
import sys

from weft.server.supervise.spawn import start_ahead

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Run the command that the arguments name."""
    is_serving = sys.argv[1:2] == ["serve"]
    # Process 1 of a container ignores signals without a handler, and an exception would wait for a download's threads.
    # A signal that is ignored on purpose, as nohup does with SIGHUP, stays ignored.
    before = {signum: signal.getsignal(signum) for signum in _STOP if signal.getsignal(signum) != signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, lambda signum, _: os._exit(0 if is_serving else 128 + signum))
    if is_serving:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the supervisor waits for it
    if any(argument.startswith("--api-key") for argument in sys.argv):
        _hide_values("--api-key")
    if is_serving and not {"-h", "--help"} & set(sys.argv):
        start_ahead()
    from weft.server.cli.commands import app

    if not is_serving:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    app()


def _hide_values(flag: str) -> None:
    """Overwrite the values of a flag in the list of processes, which everybody on the machine can read.

    Writes asterisks over the memory that the kernel shows as this process's arguments; Python has copies of its own.
    For the milliseconds before, and in the shell's history, the values can be seen: the environment and files are
    better places for a secret. Does nothing where /proc is missing.
    """
    import ctypes

    try:
        numbers = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(numbers[45]), int(numbers[46])  # arg_start, arg_end
    except (OSError, IndexError):
        return
    name = os.fsencode(flag)
    position, is_value = start, False
    for argument in ctypes.string_at(start, end - start).split(b"\0"):
        num_shown = 0 if is_value else len(name) + 1 if argument.startswith(name + b"=") else len(argument)
        ctypes.memset(position + num_shown, ord("*"), len(argument) - num_shown)
        position += len(argument) + 1
        is_value = argument == name and not is_value


if __name__ == "__main__":
    main()
