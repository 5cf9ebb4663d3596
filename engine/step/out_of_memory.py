"""Whether an error says that the device has no memory left, whoever says it."""

import torch

_WORDS = ("out of memory", "ALLOC_FAILED")
"""What the driver ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory") and cuBLAS say."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was missing, or was when `error` arose: a recording that it breaks off fails in its own way.

    Only torch's allocator raises `torch.OutOfMemoryError`. To make a graph or to load a kernel takes memory from the
    driver, whose errors are others, as are those of cuBLAS.
    """
    while error is not None:
        is_meant = isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)
        if is_meant or isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False
