"""Steps of zeros: the one whose memory is measured on a GPU must be one that a GPU can compute."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.paged import paged_specs
from weft.engine import config as engine_config
from weft.engine.cache.specs import group_layers, paged_groups
from weft.engine.config import EngineConfig
from weft.engine.describe.config import load_model_config
from weft.engine.kernels.torch.caches import Caches
from weft.engine.kernels.torch.layer_kernels import TORCH_SAMPLING, TorchKernels
from weft.engine.kernels.torch.sdpa import SdpaBackend
from weft.engine.models.loading import load_weights
from weft.engine.runner.dummy_batch import dummy_batch, largest_batch
from weft.engine.runner.model_runner import ModelRunner
from weft.engine.sampling.sampler import sample
from weft.engine.wire.messages import EngineOptions

CPU = torch.device("cpu")


def resolve(folder: Path, max_num_batched_tokens: int) -> EngineConfig:
    options = EngineOptions(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_model_len=40,
        max_num_seqs=4,
        block_size=16,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return engine_config.resolve(options, load_model_config(folder))


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "lengths"), [(30, [30]), (100, [40, 40, 20]), (1000, [40, 40, 40, 40])]
)
def test_the_step_that_is_measured_stays_within_the_context(
    checkpoint_folder: Callable[[str], Path], max_num_batched_tokens: int, lengths: list[int]
) -> None:
    """It was one prompt of max_num_batched_tokens, whose positions most models have no rotary embedding for."""
    folder = checkpoint_folder("qwen3")
    config = resolve(folder, max_num_batched_tokens)
    batch = largest_batch(config, paged_specs(None))
    assert batch.seq_lens.tolist() == lengths
    assert sorted(set(batch.groups[0].slot_mapping.tolist())) == sorted(batch.groups[0].slot_mapping.tolist())
    assert batch.groups[0].slot_mapping[-1] // 16 == batch.groups[0].block_tables[-1, (lengths[-1] - 1) // 16]
    model = load_weights(
        folder, load_model_config(folder), TorchKernels(), device=CPU, dtype=torch.float32, max_model_len=40
    )
    num_blocks = int(batch.groups[0].block_tables.max()) + 1
    groups = paged_groups(group_layers(model.cache_specs))
    runner = ModelRunner(model, Caches(SdpaBackend(groups, num_blocks, 16, torch.float32, CPU)), CPU)
    assert len(runner.collect(runner.launch(batch)).logprobs) == 4


def test_the_step_that_is_measured_asks_for_all_that_sampling_can_do(checkpoint_folder: Callable[[str], Path]) -> None:
    """A step without filters and log-probabilities was measured, which takes a fraction of their memory."""
    sampling = largest_batch(resolve(checkpoint_folder("qwen3"), 64), paged_specs(None)).sampling
    samples = sample(torch.randn(4, 99), sampling, None, kernels=TORCH_SAMPLING)
    assert samples.logprobs is not None
    assert samples.logprobs.top_ids.shape == (4, 20)
    filters = (sampling.temperatures, sampling.top_ks, 1 - sampling.top_ps, sampling.min_ps)
    assert all((values > 0).all() and len(values) == 4 for values in filters)
    assert sampling.penalties is not None


def test_a_prompt_takes_the_first_blocks() -> None:
    batch = dummy_batch(20, paged_specs(None, 8), 16, 3)
    assert batch.groups[0].block_tables.tolist() == batch.groups[1].block_tables.tolist() == [[1, 2]]
    assert batch.groups[0].slot_mapping.tolist() == list(range(16, 36))
    assert batch.query_start_locs.tolist() == [0, 20]
    assert batch.row_indices.tolist() == [17, 18, 19]


def test_prompts_that_go_on_have_tokens_behind_them() -> None:
    batch = dummy_batch(38, paged_specs(None), 16, 2, 19, num_cached=1, capacity=40)
    assert batch.num_tokens == 38 and batch.seq_lens.tolist() == [20, 20]
    assert batch.positions.tolist() == [*range(1, 20), *range(1, 20)]
    assert batch.groups[0].block_tables.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch.groups[0].slot_mapping.tolist() == [*range(17, 36), *range(65, 84)]
    assert batch.query_start_locs.tolist() == [0, 19, 38] and batch.row_indices.tolist() == [36, 37]
