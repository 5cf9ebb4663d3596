import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.kernels.torch.layer_kernels import weight_floors

F32 = np.float32


def floors(weights: torch.Tensor, *, top_ks: object = 0, top_ps: object = 1.0, min_ps: object = 0.0) -> list[float]:
    top_k, top_p, min_p = (np.broadcast_to(values, len(weights)).copy() for values in (top_ks, top_ps, min_ps))  # type: ignore
    found = weight_floors(weights, top_k.astype(np.int64), top_p.astype(F32), min_p.astype(F32))
    assert found.shape == (len(weights), 1)
    return found[:, 0].tolist()


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
    """Of weights that are multiples of 2**-12, so that every order of summation gives the same total."""
    logits = np.random.default_rng(seed).normal(size=vocab_size) * spread
    weights = (np.round(np.exp(logits - logits.max()) * 4096) / 4096).astype(F32)
    target = top_p * weights.sum(dtype=np.float64)
    (floor,) = floors(torch.from_numpy(weights)[None], top_ps=top_p)
    assert floor in weights
    assert weights[weights >= floor].sum(dtype=np.float64) >= target
    above = weights[weights > floor].sum(dtype=np.float64)
    assert above < target or len(weights[weights > floor]) == 0


def test_nucleus_of_literal_weights() -> None:
    weights = torch.tensor([[0.25, 1.0, 0.5, 0.25]]).repeat(5, 1)  # probabilities 1/8, 1/2, 1/4, 1/8
    assert floors(weights, top_ps=[0.0, 0.5, 0.51, 0.76, 1.0]) == [1.0, 1.0, 0.5, 0.25, 0.25]


def test_the_nucleus_is_that_of_what_the_other_filters_leave() -> None:
    weights = torch.tensor([[0.25, 1.0, 0.5, 0.25]]).repeat(3, 1)
    assert floors(weights, top_ps=0.6, top_ks=[0, 2, 0], min_ps=[0.0, 0.0, 0.5]) == [0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("top_k", "floor"), [(0, 0.125), (1, 1.0), (2, 0.5), (3, 0.5), (4, 0.25), (5, 0.125), (9, 0.125)]
)
def test_top_k_keeps_ties(top_k: int, floor: float) -> None:
    assert floors(torch.tensor([[0.5, 0.25, 1.0, 0.5, 0.125]]), top_ks=top_k) == [floor]


def test_the_stricter_of_min_p_and_top_k_decides() -> None:
    weights = torch.tensor([[1.0, 0.5, 0.25, 0.125]]).repeat(2, 1)
    assert floors(weights, top_ks=[2, 3], min_ps=[0.2, 0.3]) == pytest.approx([0.5, 0.3])
