"""Allocates large arrays in huge pages, if the kernel grants them: fewer page-table walks while streaming."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

_HUGE_PAGE_BYTES = 2 << 20
# Steps ask for memory this many times as fast as they write to it, until a page of every array is ahead.
_LEAD = 2
# A step asks for a page of at most a quarter of the arrays, because the first token of a prompt waits for it.
_LARGEST_SHARE = 4


def allocate(num_values: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of zeros that takes no memory before it is written to.

    Arrays of at least one huge page (2 MB) start on a page boundary.
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
