import numpy as np
import pytest
import torch

from weft.engine.sampling import scores as chunks

VOCAB_SIZES = [1, 2, 127, 128, 129, 1000, 5000, 32003]


def _logits(num_rows: int, vocab_size: int, *, grid: float | None = None) -> torch.Tensor:
    values = np.random.default_rng(vocab_size).normal(size=(num_rows, vocab_size)) * 4
    return torch.tensor(values if grid is None else np.round(values / grid) * grid, dtype=torch.float32)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("k", [1, 3, 64])
def test_top_k_orders_by_value_then_id(vocab_size: int, k: int) -> None:
    values = _logits(4, vocab_size, grid=1.0)
    values[0] = -0.0
    values[0, ::2] = 0.0  # equal to -0.0
    k = min(k, vocab_size)
    found, ids = chunks.top_k(values, k)
    for row, row_ids in zip(values.numpy(), ids.numpy(), strict=True):
        assert row_ids.tolist() == np.lexsort((np.arange(vocab_size), -row))[:k].tolist()
    assert torch.equal(found, values.gather(-1, ids))


def test_values_below_the_padding_of_the_last_chunk_keep_their_ids_in_range() -> None:
    values = torch.full((1, 130), float("-inf"))
    found, ids = chunks.top_k(values, 130)
    assert ids.tolist() == [list(range(130))]
    assert torch.isneginf(found).all()


def test_ids_of_nan_rows_are_in_range() -> None:
    values = torch.full((1, 130), float("nan"))
    assert int(chunks.top_k(values, 130)[1].max()) < 130
