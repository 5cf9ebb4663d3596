"""What bounds a process that reads what strangers wrote: foreign templates, or files of sound."""

import os
import resource
import signal
from typing import Final

_KEPT: Final = ("PATH", "HOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")
_PAGE_BYTES: Final = resource.getpagesize()


def child_environment() -> dict[str, str]:
    """The environment of such a process, with what is for Python; other variables may hold keys."""
    return {name: text for name, text in os.environ.items() if name in _KEPT or name.startswith("PYTHON")}


def bound_this_process(max_bytes: int) -> int:
    """Let this process end only when its owner says so, or before any other where the machine has no memory left.

    Args:
        max_bytes: By which its address space may grow.

    Returns:
        The size of that before.
    """
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _be_first_to_go()
    start = address_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = start + max_bytes if hard == resource.RLIM_INFINITY else min(start + max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return start


def _be_first_to_go() -> None:
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return


def address_bytes() -> int:
    """The size of the address space; 0 if it is unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * _PAGE_BYTES
    except OSError:
        return 0
