"""The checks of sampling_parity.py in Triton's interpreter; test_sampling.py runs this file in a process of its own."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.engine.kernels.triton import sampling_parity as parity
from weft.engine.kernels.triton.penalties import pack
from weft.engine.kernels.triton.sampling import has_filters, pack_parameters
from weft.engine.step.batch import PenaltyBatch, Placeholders
from weft.engine.step.masks import RowMasks

CPU = torch.device("cpu")
# On the way to a weight of 0, or of a row whose weights nobody reads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
]


@pytest.mark.parametrize("vocab_size", parity.SMALL_VOCABULARIES)
def test_ids(vocab_size: int) -> None:
    parity.check_ids(CPU, vocab_size, num_rows=8)


@pytest.mark.parametrize("check", parity.CHECKS)
def test_parity(check: Callable[[torch.device], None]) -> None:
    check(CPU)


def test_parameters() -> None:
    batch = parity.make_batch(
        3,
        temperatures=np.array([0.0, 0.5, 1e-45]),
        top_ks=np.array([3, 10, 9]),
        top_ps=np.array([1.0, 0.9, 1.0]),
        min_ps=np.array([0.0, 0.0, 1.0]),
        uniforms=np.array([0.0, 0.25, 0.5]),
    )
    masks = RowMasks(np.array([1]), np.ones((1, 1), np.int32))
    largest = float(np.finfo(np.float32).max)
    assert pack_parameters(batch, masks, 10).T.tolist() == [
        [0.0, -parity.INF, 3.0, 1.0, 0.0, -1.0],
        [2.0, -parity.INF, 0.0, np.float32(0.9), 0.25, 0.0],  # a top_k of the whole vocabulary is none
        [largest, 0.0, 9.0, 1.0, 0.5, -1.0],
    ]
    assert pack_parameters(batch, None, 10)[5].tolist() == [-1.0] * 3
    assert has_filters(batch)
    assert not has_filters(parity.make_batch(2, temperatures=1.0))


def test_packed_penalties() -> None:
    """Ids beyond 2**24, which no float32 holds, stay what they are."""
    penalties = PenaltyBatch(
        rows=np.array([3, 1]),
        presence=np.array([0, 1], np.float32),
        frequency=np.array([-2, 0], np.float32),
        repetition=np.array([1, 0.5], np.float32),
        starts=np.array([0, 2, 3]),
        ids=np.array([2**24 + 1, 7, 8]),
        counts=np.array([0, 4, 1]),
        placeholders=Placeholders(np.array([1]), np.array([5])),
    )
    packed = pack(penalties)
    assert packed.dtype == np.int32
    assert packed[:8].tolist() == [3, 1, 0, 2, 2, 3, -1, 5]
    assert packed[8:14].view(np.float32).tolist() == [1, 0.5, 0, 1, -2, 0]
    assert packed[14:].tolist() == [2**24 + 1, 7, 8, 0, 4, 1]
