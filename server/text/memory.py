"""Returns freed memory to the system."""

import ctypes
import sys


def return_free_memory() -> None:
    """Return freed memory to the system, which glibc would keep."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent from other C libraries
        if trim is not None:
            trim(0)
