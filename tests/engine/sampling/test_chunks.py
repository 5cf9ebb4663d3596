import numpy as np
import pytest
import torch

from weft.engine.sampling import chunks

VOCAB_SIZES = [1, 2, 127, 128, 129, 1000, 5000, 32003]


def _logits(num_rows: int, vocab_size: int, *, grid: float | None = None) -> torch.Tensor:
    values = np.random.default_rng(vocab_size).normal(size=(num_rows, vocab_size)) * 4
    return torch.tensor(values if grid is None else np.round(values / grid) * grid, dtype=torch.float32)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("grid", [None, 4.0])
def test_argmax_is_the_first_of_the_largest(vocab_size: int, grid: float | None) -> None:
    values = _logits(6, vocab_size, grid=grid)
    assert chunks.argmax(values).tolist() == values.numpy().argmax(-1).tolist()


def test_argmax_finds_the_last_id_of_a_short_last_chunk() -> None:
    values = torch.zeros(1, 300)
    values[0, 299] = 1.0
    assert chunks.argmax(values).tolist() == [299]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("k", [1, 3, 64, 2000])
def test_top_values_equal_a_sort(vocab_size: int, k: int) -> None:
    values = _logits(4, vocab_size, grid=0.5)
    k = min(k, vocab_size)
    expected = np.sort(values.numpy())[:, ::-1][:, :k]
    assert np.array_equal(chunks.top_values(values, k).numpy(), expected)


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
    assert torch.isneginf(chunks.top_values(values, 130)).all()


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_draw_inverts_the_cumulated_weights(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    weights = torch.softmax(_logits(200, vocab_size), -1)
    uniforms = generator.random(200, dtype=np.float32)
    ids = chunks.draw(weights, torch.from_numpy(uniforms)).numpy()
    cumulated = weights.numpy().cumsum(-1, dtype=np.float64)
    for row, (token_id, uniform) in enumerate(zip(ids, uniforms, strict=True)):
        below = cumulated[row, token_id - 1] if token_id else 0.0
        assert below - 1e-6 <= uniform * cumulated[row, -1] <= cumulated[row, token_id] + 1e-6


@pytest.mark.parametrize("uniform", [0.0, 2.0**-24, 0.5, 1 - 2.0**-24])
@pytest.mark.parametrize("vocab_size", [3, 128, 300, 5000])
def test_an_id_without_weight_is_never_drawn(uniform: float, vocab_size: int) -> None:
    generator = np.random.default_rng(0)
    weights = generator.random((300, vocab_size), dtype=np.float32) ** 20  # spans the whole range of float32
    weights[generator.random(weights.shape) < 0.8] = 0
    weights[np.arange(300), generator.integers(vocab_size, size=300)] = 1
    ids = chunks.draw(torch.from_numpy(weights), torch.full((300,), uniform)).numpy()
    assert (weights[np.arange(300), ids] > 0).all()


def test_the_ends_of_the_unit_interval_reach_the_first_and_last_id() -> None:
    weights = torch.full((2, 1000), 1.0)
    weights[:, :3] = 0
    weights[:, -5:] = 0
    assert chunks.draw(weights, torch.tensor([0.0, 1 - 2.0**-24])).tolist() == [3, 994]


def test_ids_of_nan_rows_are_in_range() -> None:
    values = torch.full((1, 130), float("nan"))
    assert 0 <= int(chunks.argmax(values)) < 130
    assert 0 <= int(chunks.draw(values, torch.tensor([0.5]))) < 130
    assert int(chunks.top_k(values, 130)[1].max()) < 130
