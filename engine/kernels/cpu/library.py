"""Loads the native kernels, compiled for the best instruction set of this CPU, and gives memory in huge pages.

There is one shared object per instruction set, in plain C over raw pointers, with its own threads (`pool.h`). If there
was no compiler at installation, there are none, and the engine uses torch's operations.
"""

import contextlib
import ctypes
import functools
import logging
import math
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from weft.engine.kernels.cpu import variants

logger = logging.getLogger(__name__)


class NativeLibrary:
    """The functions of one variant. They do not check arguments: callers pass pointers to contiguous tensors.

    Calls come from one thread at a time.
    """

    def __init__(self, variant: str, path: Path) -> None:
        """Load the shared object.

        Raises:
            OSError: It cannot be loaded, or the kernel does not let this process use AMX tiles.
        """
        self.variant = variant
        functions = ctypes.CDLL(str(path))
        if functions.weft_initialise() != 0:
            raise OSError(f"{path.name}: the kernel does not grant the use of AMX tiles")
        self._functions = functions
        self._set_num_threads = self.function("weft_set_num_threads", ctypes.c_int64)
        self.set_num_threads(torch.get_num_threads())

    def set_num_threads(self, number: int) -> None:
        """Set how many threads, the caller's included, share the work of a call; at first as many as torch uses."""
        self._set_num_threads(number)

    def function(self, name: str, *arguments: type) -> Callable[..., None]:
        """Look up a function that returns nothing, by name, with the ctypes of its arguments."""
        function: ctypes._NamedFuncPointer = self._functions[name]
        function.argtypes, function.restype = arguments, None
        return function


def compiled_variants() -> tuple[str, ...]:
    """Names of the variants that were compiled, best first. A checkout has the one that its machine runs best."""
    return tuple(variant for variant in variants.VARIANTS if _path(variant).exists())


@functools.cache
def load(variant: str | None = None) -> NativeLibrary | None:
    """The library of a variant, or the best one; None, with the reason in the log, if there is none.

    A variant that is slower than torch's operations or than another one must be asked for by name.
    """
    for name in [variant] if variant else variants.preferred():
        if not (path := _path(name)).exists():
            continue
        try:
            if _is_outdated(path):
                logger.warning("native kernels %s left out: their source has changed since; install Weft again", name)
                continue
            return NativeLibrary(name, path)
        except OSError as error:
            logger.warning("native kernels %s left out: %s", name, error)
    logger.info("native kernels: none were compiled for this CPU")
    return None


def _path(variant: str) -> Path:
    return Path(__file__).with_name(f"{variant}.so")


def _is_outdated(path: Path) -> bool:
    """Whether a variant was compiled from another source than there is: its functions may expect other arguments."""
    try:
        source = ctypes.CDLL(str(path)).weft_source
    except AttributeError:
        return True
    source.restype = ctypes.c_char_p
    return bool(source() != variants.source_digest().encode())


def cpu_name() -> str:
    """The model of the first CPU."""
    return variants.cpu_value("model name") or "unknown CPU"


_HUGE_PAGE_BYTES = 2 << 20
# Steps ask for memory this many times as fast as they write to it, until a page of every array is ahead.
_LEAD = 2
# A step asks for a page of at most a quarter of the arrays, because the first token of a prompt waits for it.
_LARGEST_SHARE = 4


def allocate(num_values: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of zeros that takes no memory before it is written to.

    Arrays of at least one huge page (2 MB) start on a page boundary, and are in huge pages if the kernel grants them:
    fewer page-table walks while streaming.
    """
    num_bytes = num_values * dtype.itemsize
    if num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_values, dtype=dtype)
    # Private: shared memory counts as a file, for which the kernel has another rule about huge pages.
    pages = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes].view(dtype)


class FirstTouch:
    """Touches pages of arrays that grow together before steps need them, in idle time or a few per step.

    A page takes memory when it is first written. On a virtual machine that returns free memory to its host, this took
    5 ms for a huge page: the pages of 28 layers in one step delayed its streams by 130 ms.
    """

    def __init__(self, arrays: Sequence[torch.Tensor], item_bytes: int) -> None:
        """Take arrays from `allocate`, whose items of item_bytes are written mostly in ascending order."""
        self._arrays = [array.view(torch.uint8).numpy() for array in arrays]
        self._item_bytes = item_bytes
        self._num_pages = min((array.nbytes // _HUGE_PAGE_BYTES for array in arrays), default=0)
        # The next page to touch. The first pages of all arrays come first, then the second pages, and so on.
        self._next = 0
        self._written = 0  # pages of every array that steps have reached

    def approach(self, item: int, num_items: float) -> None:
        """Prepare for a step that will write num_items of every array, up to item. No other thread may be writing."""
        num_arrays = len(self._arrays)
        page = -(-(item + 1) * self._item_bytes // _HUGE_PAGE_BYTES)  # the step itself touches those before
        self._written = max(self._written, page)
        self._next = start = max(self._next, page * num_arrays)
        end = min(page + 1, self._num_pages) * num_arrays
        wanted = _LEAD * num_items * self._item_bytes / _HUGE_PAGE_BYTES
        most = math.ceil(min(wanted, 1 / _LARGEST_SHARE) * num_arrays)
        while self._next < min(end, start + most):
            self._ask()

    def ask_in_idle_time(self, num_items: int) -> bool:
        """Touch one page, unless num_items beyond the most ever written have memory; returns whether it did."""
        num_arrays = len(self._arrays)
        page = self._written + -(-num_items * self._item_bytes // _HUGE_PAGE_BYTES)
        if self._next >= min(page, self._num_pages) * num_arrays:
            return False
        self._ask()
        return True

    def _ask(self) -> None:
        page, index = divmod(self._next, len(self._arrays))
        array, offset = self._arrays[index], page * _HUGE_PAGE_BYTES
        array[offset] = array[offset]  # keeps the value
        self._next += 1
