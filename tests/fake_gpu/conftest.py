import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.fake_gpu.engines import Warm

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture(scope="session")
def start_on_gpu(tmp_path_factory: pytest.TempPathFactory) -> "Callable[..., Warm]":
    """Start the engine for a checkpoint, with so many layers, on a GPU; by default one that compiles nothing."""
    from tests.checkpoints import Checkpoint
    from tests.fake_gpu.engines import Warm, start_warm, write_shape
    from tests.fake_gpu.gpu import FakeGpu

    def start_on_gpu(
        checkpoint: Checkpoint, num_layers: int | None = None, *, gpu: FakeGpu | None = None, **options: Any
    ) -> Warm:
        folder = write_shape(checkpoint, tmp_path_factory.mktemp("model"), num_layers)
        return start_warm(folder, gpu or FakeGpu(compiles=False), **options)

    return start_on_gpu


@pytest.fixture(scope="session")
def qwen3_8b(start_on_gpu: "Callable[..., Warm]") -> "Warm":
    """Two layers of it, compiled: the others would be the same kernels."""
    from tests.fake_gpu.gpu import FakeGpu
    from tests.fake_gpu.shapes import QWEN3_8B

    return start_on_gpu(QWEN3_8B, 2, gpu=FakeGpu())


@pytest.fixture(autouse=True)
def keep_torch_as_it_is() -> Iterator[None]:
    num_threads, matmul = torch.get_num_threads(), torch.backends.cuda.matmul
    yield
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(True)
