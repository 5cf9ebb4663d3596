"""Logits of every family and dialect against a full forward pass of transformers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.backend import group_layers
from engine.attention.sdpa import SdpaBackend
from engine.layers.kit import TorchKit
from engine.models.config import load_model_config
from engine.models.decoder import Decoder
from engine.weights import load_weights
from tests.checkpoints import CHECKPOINTS, MAX_POSITION_EMBEDDINGS, VOCAB_SIZE, load_reference
from tests.engine.paged import PagedRequest, PagedRequests

NUM_BLOCKS, BLOCK_SIZE = 60, 8
CPU = torch.device("cpu")


class Runner:
    """A decoder over a paged cache that keeps the logits of every token."""

    def __init__(self, folder: Path) -> None:
        config = load_model_config(folder)
        self.decoder: Decoder = load_weights(
            folder, config, TorchKit(), device=CPU, dtype=torch.float32, max_model_len=MAX_POSITION_EMBEDDINGS
        )
        groups = group_layers(self.decoder.kv_specs)
        self.backend = SdpaBackend(groups, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
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
            step = self.backend.begin(batch)
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
    decoder = load_weights(folder, config, TorchKit(), device=CPU, dtype=torch.float32, max_model_len=64)
    backend = SdpaBackend(group_layers(decoder.kv_specs), NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    paged = PagedRequests(NUM_BLOCKS, BLOCK_SIZE, (None,))
    batch = paged.make_batch([(paged.add(prompt.numpy()), len(prompt)) for prompt in make_prompts(9, 4)])
    ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
    with torch.inference_mode():
        hidden = decoder.forward(ids, positions, backend.begin(batch))
        for rows in ([8, 12], [3], list(range(13)), []):
            wanted = torch.tensor(rows, dtype=torch.int64)
            torch.testing.assert_close(
                decoder.forward(ids, positions, backend.begin(batch), wanted), hidden[wanted], atol=1e-6, rtol=0
            )


def test_kv_specs_follow_the_windows_of_the_layers(checkpoint_folder: Callable[[str], Path]) -> None:
    decoder = Runner(checkpoint_folder("qwen3-windows")).decoder
    assert [spec.sliding_window for spec in decoder.kv_specs] == [7, None, 7]
    assert {(spec.num_kv_heads, spec.head_dim) for spec in decoder.kv_specs} == {(2, 16)}


def test_bfloat16_stays_close_to_float32(checkpoint_folder: Callable[[str], Path]) -> None:
    folder = checkpoint_folder("qwen3")
    config = load_model_config(folder)
    (prompt,) = make_prompts(40)
    (exact,) = Runner(folder).run([prompt], 40)
    decoder = load_weights(folder, config, TorchKit(), device=CPU, dtype=torch.bfloat16, max_model_len=64)
    backend = SdpaBackend(group_layers(decoder.kv_specs), NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, CPU)
    paged = PagedRequests(NUM_BLOCKS, BLOCK_SIZE, (None,))
    batch = paged.make_batch([(paged.add(prompt.numpy()), 40)])
    with torch.inference_mode():
        hidden = decoder.forward(prompt, torch.from_numpy(batch.positions), backend.begin(batch))
        logits = decoder.compute_logits(hidden)
    assert hidden.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert np.corrcoef(logits.flatten(), exact.flatten())[0, 1] > 0.999
