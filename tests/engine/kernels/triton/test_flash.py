"""Which steps and layers torch's FlashAttention 2 may compute. `make gpu` compares its results."""

import dataclasses

import pytest
import torch

from tests.engine.kernels.triton.prompts import PromptCase
from weft.engine.cache.specs import PagedKV
from weft.engine.kernels.triton.prompts import FlashAttention2, PromptLayers


def takes(window: int | None, *lengths: tuple[int, int]) -> bool:
    case = PromptCase(PagedKV(2, 64, window), list(lengths))
    prompts, _ = case.find()
    step = FlashAttention2().begin(prompts, case.layers)
    assert step is None or (step.tokens, step.starts.tolist()) == (prompts.tokens, prompts.starts.tolist())
    return step is not None


def test_only_prompts_that_begin_are_taken() -> None:
    assert takes(None, (0, 6), (3, 1), (0, 130))
    assert not takes(None, (0, 6), (16, 130))


def test_a_prompt_may_fill_the_sliding_window_but_not_exceed_it() -> None:
    assert not takes(5, (0, 6), (50, 1))
    assert takes(6, (0, 6), (50, 1))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "expected"),
    [
        (128, torch.bfloat16, True),
        (80, torch.float16, True),
        (256, torch.bfloat16, True),
        (264, torch.bfloat16, False),
        (84, torch.bfloat16, False),
        (128, torch.float32, False),
    ],
)
def test_heads_and_types_that_it_computes(head_dim: int, dtype: torch.dtype, expected: bool) -> None:
    layers = PromptLayers(PagedKV(2, head_dim), 8, dtype, dtype, 16, (8, 0))
    supports = FlashAttention2().supports
    assert supports(layers) is expected
    assert supports(dataclasses.replace(layers, cache_dtype=torch.float8_e4m3fn)) is expected, "it reads no cache"
    assert not supports(dataclasses.replace(layers, capability=(7, 5)))
    assert not supports(dataclasses.replace(layers, spec=PagedKV(2, head_dim, soft_cap=50.0)))
    assert not supports(dataclasses.replace(layers, spec=PagedKV(2, head_dim, scale=0.1)))
