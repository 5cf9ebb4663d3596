"""Which steps and layers FlashAttention may compute."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.paged import PagedRequests
from weft import server
from weft.engine.cache.specs import PagedKV
from weft.engine.kernels.triton.flash import FreshPrompts, find_fresh_prompts, supports
from weft.engine.step.batch import Batch

DEMO = Path(server.__file__).parent / "demo_model"


def make_batch(*computed_and_scheduled: tuple[int, int]) -> Batch:
    paged = PagedRequests(400, 16, (None,))
    requests = [paged.add(np.zeros(sum(counts), np.int64)) for counts in computed_and_scheduled]
    for request, (computed, _) in zip(requests, computed_and_scheduled, strict=True):
        request.num_computed_tokens = computed
    return paged.make_batch([(r, n) for r, (_, n) in zip(requests, computed_and_scheduled, strict=True)])


def spans(prompts: FreshPrompts | None) -> tuple[int, int, list[int], int] | None:
    return prompts and (prompts.tokens.start, prompts.tokens.stop, prompts.starts.tolist(), prompts.longest)


def test_prompts_that_begin_are_found_from_the_first_to_the_last() -> None:
    assert spans(find_fresh_prompts(make_batch((0, 6)), None)) == (0, 6, [0, 6], 6)
    batch = make_batch((7, 1), (0, 6), (3, 1), (0, 2), (9, 1))
    assert spans(find_fresh_prompts(batch, None)) == (1, 10, [0, 6, 7, 9], 6)


def test_steps_with_a_prompt_that_goes_on_or_with_none_do_not_qualify() -> None:
    assert find_fresh_prompts(make_batch((0, 6), (16, 2)), None) is None
    assert find_fresh_prompts(make_batch((0, 1), (16, 1)), None) is None


def test_a_prompt_may_fill_the_sliding_window_but_not_exceed_it() -> None:
    batch = make_batch((0, 6), (50, 1))
    assert find_fresh_prompts(batch, 5) is None
    assert spans(find_fresh_prompts(batch, 6)) == (0, 6, [0, 6], 6)


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
    assert supports(PagedKV(2, head_dim), dtype) is expected
    assert not supports(PagedKV(2, head_dim, soft_cap=50.0), dtype)
    assert not supports(PagedKV(2, head_dim, scale=0.1), dtype)
