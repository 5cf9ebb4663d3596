import pytest
import torch

from weft.engine.device import is_out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("none left"), True),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
    ids=str,
)
def test_what_says_that_memory_is_missing(error: Exception | None, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_an_error_that_came_of_another_is_that_one() -> None:
    try:
        try:
            raise RuntimeError("CUDA error: out of memory")
        finally:
            raise RuntimeError("the capture was invalidated")
    except RuntimeError as error:
        assert is_out_of_memory(error)
