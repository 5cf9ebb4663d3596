"""Recognises errors that mean the device is out of memory."""

import torch

# In errors of the driver ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory") and of cuBLAS.
_WORDS = ("out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether missing memory caused an error, or an error in its context: a recording then fails with its own error.

    Only torch's allocator raises `torch.OutOfMemoryError`. Creating a graph and loading a kernel take memory from the
    driver, which raises other errors, and so does cuBLAS.
    """
    while error is not None:
        is_meant = isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)
        if is_meant or isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False
