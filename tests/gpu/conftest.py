from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def golden_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.fixture(autouse=True)
def keep_torch_as_it_is() -> Iterator[None]:
    """An engine that starts decides about threads and gradients of its process."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(True)
