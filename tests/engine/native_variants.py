"""The native kernels for every instruction set that this machine runs, compiled when a test asks for them."""

import functools
from pathlib import Path

import pytest

from weft.engine.kernels.cpu import variants
from weft.engine.kernels.cpu.library import NativeLibrary

CACHE = variants.cache_folder()
"""The user's: while tests run, the environment names an empty one for each process."""
BUILT = Path(__file__).parents[2] / "build" / "kernels"
RUNNABLE = variants.runnable()
"""Names of all, best first."""


@functools.cache
def load_variant(name: str) -> NativeLibrary:
    """One of them. Installed is only the best; the cache of compiled files has the others from the second run on."""
    try:
        made = variants.build([name], BUILT, CACHE)
        if not made:
            pytest.skip(f"the compiler does not know {name}")
        return NativeLibrary(name, made[0])
    except variants.CompilerError as error:
        pytest.skip(str(error))
    except OSError as error:  # the kernel does not grant its instructions
        pytest.skip(str(error))
