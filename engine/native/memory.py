"""Large arrays in huge pages, where the kernel grants them: fewer page-table walks while streaming."""

import contextlib
import mmap

import torch

_HUGE_PAGE_BYTES = 2 << 20


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
