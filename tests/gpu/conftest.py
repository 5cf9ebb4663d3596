from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def golden_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.fixture(autouse=True)
def keep_torch_as_it_is() -> Iterator[None]:
    """An engine that starts decides about threads, gradients and, where it is deterministic, cuBLAS of its process."""
    num_threads, library = torch.get_num_threads(), torch.backends.cuda.preferred_blas_library()
    yield
    torch.backends.cuda.preferred_blas_library(library)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(True)
