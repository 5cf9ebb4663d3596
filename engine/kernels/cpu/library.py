"""Loads Weft's native kernels: one shared object per instruction set, the best that this CPU runs.

They are plain C over raw pointers, with threads of their own (`pool.h`). Without a compiler at installation there are
no shared objects, and the engine takes torch's own operations.
"""

import ctypes
import functools
import importlib.machinery
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

logger = logging.getLogger(__name__)

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "bmi2"})

VARIANTS: Final = {
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma", "bmi2"}),
    "portable": frozenset[str](),
}
"""Instruction sets, best first, and the flags in /proc/cpuinfo that they need."""

_INSTALLATION_S = 60
"""Within this time all files of an installation are written, in any order."""


class NativeLibrary:
    """The functions of one variant. Arguments are checked by nobody: callers pass contiguous tensors' pointers.

    Calls come from one thread at a time.
    """

    def __init__(self, variant: str, path: Path) -> None:
        """Load the shared object.

        Raises:
            OSError: It cannot be loaded, or the kernel does not let this process use the CPU's tiles.
        """
        self.variant = variant
        functions = ctypes.CDLL(str(path))
        if functions.weft_initialise() != 0:
            raise OSError(f"{path.name}: the kernel does not grant the use of AMX tiles")
        self._functions = functions
        self._set_num_threads = self.function("weft_set_num_threads", ctypes.c_int64)
        self.set_num_threads(torch.get_num_threads())

    def set_num_threads(self, number: int) -> None:
        """Let so many threads, the caller's among them, share the work of a call; at first as many as torch uses."""
        self._set_num_threads(number)

    def function(self, name: str, *arguments: type) -> Callable[..., None]:
        """A function that returns nothing, by name, with the ctypes of its arguments."""
        function: ctypes._NamedFuncPointer = self._functions[name]
        function.argtypes, function.restype = arguments, None
        return function


def compiled_variants() -> tuple[str, ...]:
    """Names of the variants that were compiled, best first."""
    return tuple(variant for variant in VARIANTS if _path(variant) is not None)


def runnable_variants() -> Iterator[str]:
    """Names of the variants that this CPU runs and that were compiled, best first."""
    flags = _cpu_words("flags")
    yield from (variant for variant in compiled_variants() if VARIANTS[variant] <= flags)


@functools.cache
def load(variant: str | None = None) -> NativeLibrary | None:
    """The library of a variant, or the best one; None when there is none to be had, with the reason in the log.

    Some are only had by name. Torch's operations are faster than the portable one. The one Intel CPU that was measured,
    an Emerald Rapids without AMX, takes pairs of bfloat16 at a quarter of the rate of float32 (1.3 against 5.2 G/s), so
    it makes half as many products in a second; others of theirs are taken to be like it.
    """
    only_by_name = {"portable"} | ({"avx512_bf16"} if _cpu_words("vendor_id") == {"GenuineIntel"} else set())
    for name in [variant] if variant else [name for name in runnable_variants() if name not in only_by_name]:
        path = _path(name)
        if path and _is_outdated(path):
            logger.warning("native kernels %s left out: their source has changed since; install Weft again", name)
            continue
        try:
            library = NativeLibrary(name, path) if path else None
        except OSError as error:
            logger.warning("native kernels %s left out: %s", name, error)
            continue
        return library
    logger.info("native kernels: none were compiled for this CPU")
    return None


def _path(variant: str) -> Path | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_{variant}{suffix}")
        if path.exists():
            return path
    return None


def _is_outdated(path: Path) -> bool:
    """Whether a source file was changed after the compilation: what it expects may no longer be what callers pass."""
    latest = path.stat().st_mtime + _INSTALLATION_S
    return any(file.stat().st_mtime > latest for file in path.parent.glob("*.[ch]"))


def _cpu_words(key: str) -> frozenset[str]:
    """What /proc/cpuinfo says of the first CPU under a key."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith(key)), "").split())
