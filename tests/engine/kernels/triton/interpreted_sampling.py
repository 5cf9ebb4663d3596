"""The checks of sampling_parity.py in Triton's interpreter; test_interpreter.py runs this file."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.engine.kernels.triton import sampling_parity as parity
from weft.engine.batch import PenaltyBatch, Placeholders, RowMasks
from weft.engine.kernels.triton import sampling_jit as kernels
from weft.engine.kernels.triton.sampling import has_filters, pack_parameters
from weft.engine.kernels.triton.sampling_rows_jit import BINS, pack, to_bins

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


class Spy:
    """Launches a kernel and keeps its last arguments, by name."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.arguments: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.arguments = dict(zip(inspect.signature(self._kernel.fn).parameters, arguments, strict=False))
            self._kernel[grid](*arguments, **options)

        return launch


def test_one_program_searches_few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It searched the whole vocabulary where top-p meets flat logits, in passes of one program."""
    vocab_size = 20000
    spy = Spy(kernels.draw)
    monkeypatch.setattr(kernels, "draw", spy)
    normal = np.random.default_rng(7).normal(size=vocab_size)
    logits = torch.from_numpy(np.stack((normal, 0.02 * normal)).astype(np.float32))
    for columns in ({"top_ps": 0.9}, {"top_ks": 5000, "top_ps": 0.8}, {"min_ps": 0.001}):
        parity.pick(CPU, logits, parity.make_batch(2, temperatures=1.0, uniforms=0.5, **columns))
        num_listed, num_left = spy.arguments["sizes"], spy.arguments["counts"].sum(1)
        assert (num_listed > vocab_size / 2).all()
        assert (num_left < vocab_size / 20).all(), (columns, num_left)


@triton.jit
def _bins_kernel(weights: Any, bins: Any, SIZE: tl.constexpr) -> None:
    places = tl.arange(0, SIZE)
    tl.store(bins + places, to_bins(tl.load(weights + places)))


def test_bins() -> None:
    """Bins fall as weights rise, whatever their scale; only 1 has bin 0."""
    distances = np.concatenate((np.arange(60), np.geomspace(60, 0x3F800000, 4036).astype(np.int64)))
    weights = torch.from_numpy((0x3F800000 - distances).astype(np.int32)).view(torch.float32)
    bins = torch.empty(4096, dtype=torch.int32)
    _bins_kernel[(1,)](weights, bins, 4096)
    assert bins[:3].tolist() == [0, 1, 65]
    assert (bins.diff() >= 0).all()
    assert BINS.value // 2 < bins[-1] < BINS.value


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
        [0.0, 0.0, 3.0, 1.0, 0.0, -1.0],
        [2.0, 0.0, 0.0, np.float32(0.9), 0.25, 0.0],  # a top_k of the whole vocabulary is none
        [largest, 1.0, 9.0, 1.0, 0.5, -1.0],
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
