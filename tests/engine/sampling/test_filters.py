import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.sampling import filters

F32 = np.float32


def _weights(seed: int, vocab_size: int, spread: float) -> npt.NDArray[np.float32]:
    """A row whose weights are multiples of 2**-12, so that every order of summation gives the same total."""
    logits = np.random.default_rng(seed).normal(size=vocab_size) * spread
    weights = np.round(np.exp(logits - logits.max()) * 4096) / 4096
    return np.asarray(weights, np.float32)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([1, 5, 300, 3000]),
    spread=st.sampled_from([0.0, 0.5, 3.0]),
    top_p=st.sampled_from([0.0, 0.125, 0.5, 0.75, 0.9375]),
)
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(
    seed: int, vocab_size: int, spread: float, top_p: float
) -> None:
    weights = _weights(seed, vocab_size, spread)
    target = top_p * weights.sum(dtype=np.float64)
    floor = filters.floor_by_sorting(weights, top_p)
    assert floor in weights
    assert weights[weights >= floor].sum(dtype=np.float64) >= target
    above = weights[weights > floor].sum(dtype=np.float64)
    assert above < target or len(weights[weights > floor]) == 0
    bisected = filters.floors_by_bisection(torch.from_numpy(weights)[None], torch.tensor([top_p]))
    assert bisected.tolist() == [[float(floor)]]


def test_nucleus_of_literal_weights() -> None:
    weights = torch.tensor([[0.25, 1.0, 0.5, 0.25]]).repeat(5, 1)  # probabilities 1/8, 1/2, 1/4, 1/8
    top_ps = np.array([0.0, 0.5, 0.51, 0.76, 1.0], F32)
    assert filters.nucleus_floors(weights, top_ps)[:, 0].tolist() == [1.0, 1.0, 0.5, 0.25, 0.0]


def test_a_flat_row_is_sorted_beyond_the_first_cut() -> None:
    weights = np.full(20000, 0.5 * filters._FIRST_CUT, F32)
    weights[7] = 1
    weights[9] = 0.25 * filters._FIRST_CUT
    assert filters.floor_by_sorting(weights, 0.9) == F32(0.5 * filters._FIRST_CUT)


@pytest.mark.parametrize(("top_k", "floor"), [(0, -np.inf), (1, 3.0), (2, 2.0), (3, 2.0), (4, 1.0), (5, -np.inf)])
def test_top_k_keeps_ties(top_k: int, floor: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 3.0, 2.0, -1.0]])
    found = filters.logit_floors(
        logits, torch.tensor([[3.0]]), np.array([0.5], F32), np.array([top_k]), np.array([0], F32)
    )
    assert found.tolist() == [[floor]]


def test_min_p_is_relative_to_the_best_id_after_temperature() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1]]))
    maxima = logits[:, :1]
    for temperature, min_p, expected in [(1.0, 0.4, [1, 1, 0]), (0.5, 0.4, [1, 0, 0]), (2.0, 0.4, [1, 1, 1])]:
        floors = filters.logit_floors(
            logits, maxima, np.array([temperature], F32), np.array([0]), np.array([min_p], F32)
        )
        assert filters.at_least(logits, floors).tolist() == [expected]


def test_the_stricter_of_min_p_and_top_k_decides() -> None:
    logits = torch.arange(6.0).repeat(2, 1)
    floors = filters.logit_floors(
        logits, logits[:, 5:], np.ones(2, F32), np.array([2, 5]), np.exp(np.array([-3.0, -2.0])).astype(F32)
    )
    torch.testing.assert_close(floors, torch.tensor([[4.0], [3.0]]))


def test_selecting_every_row_copies_nothing() -> None:
    values = torch.zeros(3, 2)
    assert filters.select_rows(values, np.arange(3)) is values
    assert filters.select_rows(values, np.array([0, 2])).shape == (2, 2)
