"""Large arrays in huge pages, where the kernel grants them: fewer page-table walks while streaming."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

_HUGE_PAGE_BYTES = 2 << 20
_LEAD = 2
"""How many times as fast as memory is written to it is asked for, until a page of every array is ahead."""
_LARGEST_SHARE = 4
"""A step asks for a page of every fourth array at most: a prompt's first token waits for it."""


def allocate(num_values: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of zeros that takes no memory before it is written to.

    Arrays of at least one huge page (2 MB) start on the boundary of one.
    """
    num_bytes = num_values * dtype.itemsize
    if num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_values, dtype=dtype)
    # Private: what is shared counts as a file in memory, and of those the kernel makes huge pages by another rule.
    pages = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes].view(dtype)


class FirstTouch:
    """Asks for the memory of arrays that grow alike before they grow into it: in idle time, or else a little at a time.

    A page takes memory when it is first written to. On a virtual machine that gives free memory back to its host, a
    huge page took 5 ms to come: those of 28 layers in one step held its streams up for 130 ms.
    """

    def __init__(self, arrays: Sequence[torch.Tensor], item_bytes: int) -> None:
        """Take over what `allocate` returned; items of so many bytes are written to in ascending order, mostly."""
        self._arrays = [array.view(torch.uint8).numpy() for array in arrays]
        self._item_bytes = item_bytes
        self._num_pages = min((array.nbytes // _HUGE_PAGE_BYTES for array in arrays), default=0)
        self._next = 0
        """The page to ask for next, counted through the first ones of all arrays, then the second ones, ..."""
        self._written = 0
        """Pages of every array that steps have reached."""

    def approach(self, item: int, num_items: float) -> None:
        """A step is about to write so many items of every array, up to this one; no other thread may be writing."""
        num_arrays = len(self._arrays)
        page = -(-(item + 1) * self._item_bytes // _HUGE_PAGE_BYTES)  # the step itself asks for those before
        self._written = max(self._written, page)
        self._next = start = max(self._next, page * num_arrays)
        end = min(page + 1, self._num_pages) * num_arrays
        wanted = _LEAD * num_items * self._item_bytes / _HUGE_PAGE_BYTES
        most = math.ceil(min(wanted, 1 / _LARGEST_SHARE) * num_arrays)
        while self._next < min(end, start + most):
            self._ask()

    def ask_in_idle_time(self, num_items: int) -> bool:
        """Ask for one page, unless so many items more than ever have their memory; returns whether there was one."""
        num_arrays = len(self._arrays)
        page = self._written + -(-num_items * self._item_bytes // _HUGE_PAGE_BYTES)
        if self._next >= min(page, self._num_pages) * num_arrays:
            return False
        self._ask()
        return True

    def _ask(self) -> None:
        page, index = divmod(self._next, len(self._arrays))
        array, offset = self._arrays[index], page * _HUGE_PAGE_BYTES
        array[offset] = array[offset]  # whatever it is
        self._next += 1
