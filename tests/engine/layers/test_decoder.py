"""Logits of every family and dialect against a full forward pass of transformers."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import CHECKPOINTS, MAX_POSITION_EMBEDDINGS, VOCAB_SIZE, load_reference
from tests.engine.paged import PagedRequest, PagedRequests
from weft.engine.cache.specs import CacheGroup, PagedKV, StateSpec, group_layers, paged_groups
from weft.engine.describe.config import load_model_config
from weft.engine.kernels.cpu.layer_kernels import CpuKernels, WeightStorage
from weft.engine.kernels.cpu.layer_kernels import supports as has_native_layers
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.torch.caches import Caches, StateCache
from weft.engine.kernels.torch.layer_kernels import TorchKernels
from weft.engine.kernels.torch.sdpa import SdpaBackend
from weft.engine.layers.block import Decoder
from weft.engine.layers.kernels import LayerKernels
from weft.engine.models.loading import load_weights

NUM_BLOCKS, BLOCK_SIZE = 60, 8
CPU = torch.device("cpu")


class Runner:
    """A decoder over a paged cache that keeps the logits of every token."""

    def __init__(
        self, folder: Path, kernels: LayerKernels | None = None, dtype: torch.dtype = torch.float32, **changes: object
    ) -> None:
        """Compute a checkpoint whose configuration is changed."""
        config = load_model_config(folder)
        own = {name: value for name, value in changes.items() if hasattr(config, name)}
        switches = dataclasses.replace(config.switches, **{n: v for n, v in changes.items() if n not in own})  # type: ignore[arg-type]
        config = dataclasses.replace(config, **own, switches=switches)  # type: ignore[arg-type]
        self.decoder: Decoder = load_weights(
            folder, config, kernels or TorchKernels(), device=CPU, dtype=dtype, max_model_len=MAX_POSITION_EMBEDDINGS
        )
        groups = group_layers(self.decoder.cache_specs)
        states = {i: CacheGroup(g.spec, g.layers) for i, g in enumerate(groups) if isinstance(g.spec, StateSpec)}
        attention = SdpaBackend(paged_groups(groups), NUM_BLOCKS, BLOCK_SIZE, dtype, CPU)
        self.caches = Caches(attention, StateCache(states, NUM_BLOCKS, CPU) if states else None)
        self.paged = PagedRequests(NUM_BLOCKS, BLOCK_SIZE, tuple(group.spec.sliding_window for group in groups))

    def run(self, prompts: list[torch.Tensor], chunk_size: int) -> list[torch.Tensor]:
        """Compute prompts in chunks, all in the same steps; returns logits (num_tokens, vocab_size) of each."""
        requests = [self.paged.add(prompt.numpy()) for prompt in prompts]
        logits: list[list[torch.Tensor]] = [[] for _ in requests]
        while left := [request for request in requests if request.num_computed_tokens < len(request.token_ids)]:
            counts = [min(chunk_size, len(r.token_ids) - r.num_computed_tokens) for r in left]
            step_logits = self._step(list(zip(left, counts, strict=True)))
            for request, rows in zip(left, torch.split(step_logits, counts), strict=True):
                logits[requests.index(request)].append(rows)
        return [torch.cat(rows) for rows in logits]

    def _step(self, scheduled: list[tuple[PagedRequest, int]]) -> torch.Tensor:
        batch = self.paged.make_batch(scheduled)
        with torch.inference_mode():
            step = self.caches.begin(batch)
            hidden = self.decoder.forward(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions), step)
            return self.decoder.compute_logits(hidden).clone()


def make_prompts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_those_of_transformers(name: str, checkpoint_folder: Callable[[str], Path]) -> None:
    folder = checkpoint_folder(name)
    prompts = make_prompts(90, 31, 1)
    reference = load_reference(folder)
    with torch.inference_mode():
        expected = [reference(prompt[None]).logits[0] for prompt in prompts]
    for chunk_size in (1, 7, 90):
        runner = Runner(folder)
        alone = runner.run(prompts[:1], chunk_size)
        together = Runner(folder).run(prompts, chunk_size)
        for logits, target in zip(alone + together, expected[:1] + expected, strict=True):
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, target, atol=1e-4, rtol=0)


def test_wanted_rows_are_those_among_all(checkpoint_folder: Callable[[str], Path]) -> None:
    folder = checkpoint_folder("qwen3")
    config = load_model_config(folder)
    decoder = load_weights(folder, config, TorchKernels(), device=CPU, dtype=torch.float32, max_model_len=64)
    groups = paged_groups(group_layers(decoder.cache_specs))
    caches = Caches(SdpaBackend(groups, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU))
    paged = PagedRequests(NUM_BLOCKS, BLOCK_SIZE, (None,))
    batch = paged.make_batch([(paged.add(prompt.numpy()), len(prompt)) for prompt in make_prompts(9, 4)])
    ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
    with torch.inference_mode():
        hidden = decoder.forward(ids, positions, caches.begin(batch))
        for rows in ([8, 12], [3], list(range(13)), []):
            wanted = torch.tensor(rows, dtype=torch.int64)
            torch.testing.assert_close(
                decoder.forward(ids, positions, caches.begin(batch), wanted), hidden[wanted], atol=1e-6, rtol=0
            )


def test_cache_specs_follow_the_windows_of_the_layers(checkpoint_folder: Callable[[str], Path]) -> None:
    decoder = Runner(checkpoint_folder("qwen3-windows")).decoder
    assert decoder.cache_specs == (PagedKV(2, 16, 7), PagedKV(2, 16), PagedKV(2, 16, 7))


@pytest.mark.parametrize("name", ["qwen3", "gemma", "gemma2"])
def test_bfloat16_stays_close_to_float32(checkpoint_folder: Callable[[str], Path], name: str) -> None:
    folder, prompts = checkpoint_folder(name), make_prompts(40)
    (exact,) = Runner(folder).run(prompts, 40)
    (logits,) = Runner(folder, dtype=torch.bfloat16).run(prompts, 40)
    assert logits.dtype == torch.float32
    assert np.corrcoef(logits.flatten(), exact.flatten())[0, 1] > 0.999


@pytest.mark.parametrize(("storage", "least"), [("bfloat16", 0.999), ("int8", 0.99)])
def test_native_matrices_serve_gemma_2(
    checkpoint_folder: Callable[[str], Path], library: NativeLibrary, storage: WeightStorage, least: float
) -> None:
    folder, prompts = checkpoint_folder("gemma2-wide"), make_prompts(40, 60)
    assert has_native_layers(load_model_config(folder), torch.bfloat16, CPU)
    for exact, logits in zip(
        Runner(folder).run(prompts, 40),
        Runner(folder, CpuKernels(library, storage), torch.bfloat16).run(prompts, 40),
        strict=True,
    ):
        assert np.corrcoef(logits.flatten(), exact.flatten())[0, 1] > least


@pytest.mark.parametrize(
    "change",
    [
        {"norm_offset": 0.0},
        {"embedding_scale": 1.0},
        {"attention_scale": None},
        {"attention_soft_cap": None},
        {"logit_soft_cap": None},
        {"sliding_windows": (None,) * 4},
        {"sliding_windows": (9, None, 9, None)},
        {"activation": "silu"},
    ],
    ids=str,
)
def test_gemma_2_would_not_equal_transformers_without_each_switch(
    checkpoint_folder: Callable[[str], Path], change: dict[str, object]
) -> None:
    folder, prompts = checkpoint_folder("gemma2"), make_prompts(40)
    (right,) = Runner(folder).run(prompts, 40)
    (wrong,) = Runner(folder, **change).run(prompts, 40)
    assert (right - wrong).abs().max() > 0.05
