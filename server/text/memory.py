"""Memory that this process no longer needs."""

import ctypes
import sys


def return_free_memory() -> None:
    """Give what was freed back to the system; glibc keeps it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent from other C libraries
        if trim is not None:
            trim(0)
