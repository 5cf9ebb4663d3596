"""How the engine's processes end: with their parent, or because they cannot load the model."""

import ctypes
import os
import signal
import sys

from weft.engine.device import is_out_of_memory
from weft.engine.wire.errors import EXIT_CANNOT_LOAD, ModelError

_PR_SET_PDEATHSIG = 1


def cannot_load(error: Exception) -> int:
    """Say why a model cannot be loaded, and return the exit code for that; any other error is raised."""
    if not isinstance(error, ModelError) and not is_out_of_memory(error):
        raise error
    print(f"weft: error: {first_line(error)}", file=sys.stderr)
    return EXIT_CANNOT_LOAD


def first_line(error: BaseException) -> str:
    """What an error says, in one line of characters that every output takes."""
    return (str(error) or repr(error)).splitlines()[0].encode(errors="backslashreplace").decode()


def follow_parent(parent: int) -> bool:
    """Die with the parent, which alone heeds signals to end; returns False if it died before this took effect."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return os.getppid() == parent
