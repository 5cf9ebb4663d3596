"""Runs a module as a child of the supervisor: `python -m weft.engine.start.launch MODULE ARGUMENT...`.

A failure for lack of memory, files or threads, even while the module is imported, gives one line on stderr and exit
code 2 in place of a traceback; the supervisor gives up if that happens at the first start. Everything else is as with
`python -m MODULE`.

`launch MODULE --when-told FD` imports what an engine needs, and waits for a message on the socket FD: the arguments as
JSON, and the files that become its standard streams.
"""

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import sys

from weft.engine.wire import errors as limits

EXIT_LIMIT = 2
_MAX_MESSAGE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the module with its own name and arguments."""
    del sys.argv[0]
    if sys.argv[1:2] == ["--when-told"]:
        _wait_for_arguments(int(sys.argv[2]))
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except Exception as error:
        fault = limits.explain(error)
        if fault is None:
            raise
        print(f"weft: error: {sys.argv[0]}: {fault}", file=sys.stderr, flush=True)
        os._exit(EXIT_LIMIT)  # at once: half-built objects would print more while they are torn down


def _wait_for_arguments(fd: int) -> None:
    with contextlib.suppress(Exception):  # it comes again, and is told, when the module runs
        importlib.import_module("weft.engine.start.startup")
    with socket.socket(fileno=fd) as link:
        message, files, *_ = socket.recv_fds(link, _MAX_MESSAGE_BYTES, 3)
    if not files:
        os._exit(0)  # nobody needs an engine
    for stream, file in enumerate(files):
        os.dup2(file, stream)
        os.close(file)
    sys.argv[1:] = json.loads(message)


def follow_parent(parent: int) -> bool:
    """Die with the parent, which alone heeds signals to end; returns False if it died before this took effect."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return os.getppid() == parent


def cannot_load(error: Exception) -> int:
    """Say why a model cannot be loaded, and return the exit code for that; any other error is raised."""
    from weft.engine.device import is_out_of_memory  # imports torch

    if not isinstance(error, limits.ModelError) and not is_out_of_memory(error):
        raise error
    print(f"weft: error: {limits.first_line(error)}", file=sys.stderr)
    return limits.EXIT_CANNOT_LOAD


if __name__ == "__main__":
    main()
