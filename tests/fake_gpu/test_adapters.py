"""Adapters on a GPU that is not there: a step with some compiles nothing after the start-up, and waits for nothing."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.checkpoints import CHECKPOINTS
from tests.fake_gpu.engines import Warm
from tests.fake_gpu.gpu import FakeGpu
from weft import server
from weft.engine.describe.config import load_model_config
from weft.engine.kernels.torch.layer_kernels import TorchSite
from weft.engine.kernels.triton.products import TritonSite
from weft.engine.lora.adapted_layers import Delta, EmbeddingSite, StepRows
from weft.engine.lora.adapters import Adapters
from weft.engine.lora.targets import Targets
from weft.engine.parts.decoder import decoder_spec
from weft.engine.runner.dummy_batch import dummy_batch

DEMO = Path(server.__file__).parent / "demo_model"


def test_kernels_are_compiled_at_start_up(start_on_gpu: Callable[..., Warm]) -> None:
    """The first request with an adapter waited for that, and so did all others."""
    warm = start_on_gpu(CHECKPOINTS["qwen3-dialect4"], max_loras=1)
    variants, num_known = warm.gpu.record.variants, len(warm.gpu.record.variants)
    batch = dummy_batch(5, warm.engine.scheduler.kv.specs, 16, 5, 1)
    warm.gpu.cuda.waits.clear()
    with warm.gpu:
        warm.engine._executor.launch(dataclasses.replace(batch, adapters=np.ones(batch.num_requests, np.int64)))
    assert warm.gpu.launches["shrink"] > 0
    assert list(map(str, variants[num_known:])) == []
    assert warm.gpu.cuda.waits == []


def test_adapters_of_embeddings_wait_for_nothing() -> None:
    """The rows of each adapter were copied from memory that is not pinned."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    with FakeGpu(compiles=False) as gpu:
        site = EmbeddingSite(TritonSite((16, 8), 1, 2, 8, dtype, device), 8, 0)
        outputs, ids = torch.zeros(3, 16, dtype=dtype, device=device), torch.zeros(3, dtype=torch.int64, device=device)
        rows = StepRows(np.array([1, 0, 1]), device)
        site.add(outputs, ids, rows)
        assert gpu.launches["shrink"] == 0, "no adapter changes the embedding"
        site.put(1, [Delta(0, torch.ones(4, 20, dtype=dtype, device=device), outputs.new_ones(16, 4))])
        gpu.cuda.waits.clear()
        site.add(outputs, ids, rows)
    assert gpu.launches["shrink"] == 1
    assert gpu.cuda.waits == []


def test_what_another_thread_loads_goes_to_the_gpu_of_this_process() -> None:
    """A new thread begins with the first GPU, which is that of another rank."""
    model = load_model_config(DEMO)
    spec, cuda = decoder_spec(model), torch.device("cuda")
    with FakeGpu(compiles=False):
        targets = Targets(model, DEMO, spec, spec)
        adapters = Adapters(targets, 1, 8, 16, cuda, torch.bfloat16, lambda ref, count, size: TorchSite(size))
    assert adapters._device == torch.device("cuda", 0)
