from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.checkpoints import Checkpoint, write_config
from tests.fake_gpu.gpu import FakeGpu
from tests.fake_gpu.shapes import QWEN3_8B
from weft.engine.core.engine import Engine
from weft.engine.run.startup import start
from weft.engine.shared.messages import EngineOptions


@dataclass(frozen=True)
class Warm:
    """An engine after its start-up, and the GPU that it believes in, which is to be entered for each step."""

    gpu: FakeGpu
    engine: Engine
    max_model_len: int
    vocab_size: int


Start = Callable[..., Warm]

KERNELS = {
    "decode_attention": "triton-16k",
    "prefill_attention": "triton-64",
    "norm_and_activation": "triton",
    "few_row_products": "triton",
    "sampler": "triton",
}
"""Weft's own, as settings may ask for them: nothing can be measured here."""


@pytest.fixture(scope="session")
def start_on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start an engine on a GPU that is not there, as the server does."""

    def start_on_gpu(
        checkpoint: Checkpoint, num_layers: int | None = None, *, gpu: FakeGpu | None = None, **options: Any
    ) -> Warm:
        changes = {} if num_layers is None else {"num_hidden_layers": num_layers, "layer_types": None}
        folder = write_config(checkpoint, tmp_path_factory.mktemp("model"), **changes)
        gpu = gpu or FakeGpu(compiles=False)
        with gpu:
            options = {"model": str(folder), "device": "cuda", "load_format": "dummy", "kernels": KERNELS, **options}
            started = start(EngineOptions(**options), "test")
            while started.engine.prepare(60.0) is not None:
                pass
        return Warm(gpu, started.engine, started.info.max_model_len, started.info.vocab_size)

    return start_on_gpu


@pytest.fixture(scope="session")
def qwen3_8b(start_on_gpu: Start) -> Warm:
    """Two layers of it, compiled: the others would be the same kernels."""
    return start_on_gpu(QWEN3_8B, 2, gpu=FakeGpu())


@pytest.fixture(autouse=True)
def keep_torch_as_it_is() -> Iterator[None]:
    num_threads, matmul = torch.get_num_threads(), torch.backends.cuda.matmul
    yield
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(True)
