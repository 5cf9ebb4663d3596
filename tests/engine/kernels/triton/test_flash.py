"""Which steps FlashAttention may compute, and when it is chosen."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.paged import PagedRequests
from weft import server
from weft.engine.cache.specs import PagedKV
from weft.engine.kernels.triton import flash
from weft.engine.kernels.triton.flash import FreshPrompts, find_fresh_prompts, is_faster, supports
from weft.engine.models.config import load_model_config
from weft.engine.run.config import resolve
from weft.engine.shared.messages import EngineOptions
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


class Layer:
    """A backend of which only the shapes of what it attends to are known."""

    def __init__(self, error: str = "") -> None:
        self._error = error
        self.shapes: list[torch.Size] = []

    def begin(self, batch: Batch) -> "Layer":
        assert find_fresh_prompts(batch, None)
        return self

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if self._error:
            raise RuntimeError(self._error)
        self.shapes += [queries.shape, keys.shape, values.shape]
        return queries


@pytest.mark.parametrize(("own_ms", "flash_ms", "expected"), [(2.0, 1.0, True), (1.0, 2.0, False)])
def test_the_faster_one_is_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own_ms: float, flash_ms: float, expected: bool
) -> None:
    times = iter([own_ms + 1, own_ms] * 2 + [own_ms] + [flash_ms + 9] * 4 + [flash_ms])

    def measure(call: Callable[[], object]) -> float:
        call()
        return next(times)

    monkeypatch.setattr(flash, "_measure", measure)
    config = resolve(EngineOptions(model=str(DEMO), device="cpu", max_num_batched_tokens=5000), load_model_config(DEMO))
    layers = {"triton": Layer(), "flash": Layer()}
    with caplog.at_level("INFO", "weft.engine.kernels.triton.flash"):
        assert is_faster(lambda choice, _: layers[choice], PagedKV(2, 32), 6, config) is expected
    assert all(layer.shapes[:3] == [(5000, 6, 32), (5000, 2, 32), (5000, 2, 32)] for layer in layers.values())
    assert f"Triton {own_ms:.3f} ms, FlashAttention 2 {flash_ms:.3f} ms" in caplog.text


def test_where_torch_has_no_flash_attention_it_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flash, "_measure", lambda call: float(call() is None))
    config = resolve(EngineOptions(model=str(DEMO), device="cpu"), load_model_config(DEMO))
    layers = {"triton": Layer(), "flash": Layer("no kernel image")}
    assert not is_faster(lambda choice, _: layers[choice], PagedKV(2, 32), 6, config)
    assert "FlashAttention 2 cannot be used: no kernel image" in caplog.text
