"""Checks of `weft.engine.kernels.triton.adapters` against torch's sums, on any device."""

import numpy as np
import torch

from weft.engine.kernels.torch.adapters import TorchSite
from weft.engine.kernels.triton.adapters import TritonSite
from weft.engine.lora.step_rows import Delta, StepRows

NUM_OUTS, COLUMNS, RANK = 200, 72, 100


def random_deltas(
    runs: tuple[tuple[int, int], ...], rank: int, device: torch.device, dtype: torch.dtype
) -> list[Delta]:
    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * 0.2).to(device, dtype)

    return [Delta(first, draw(rank, COLUMNS), draw(size, rank)) for first, size in runs]


def sites(device: torch.device, dtype: torch.dtype) -> tuple[TritonSite, TorchSite]:
    """Three slots of different ranks, one of which adds to some outputs only, and one that was replaced."""
    ours, exact = TritonSite((NUM_OUTS, COLUMNS), 3, 3, RANK, dtype, device), TorchSite(0)
    ours.put(3, random_deltas(((0, 200),), RANK, device, dtype))
    for slot, (runs, rank) in enumerate(
        [(((0, 70), (70, 90), (160, 40)), RANK), (((30, 41), (160, 40)), 3), (((5, 100),), 16)], 1
    ):
        deltas = random_deltas(runs, rank, device, dtype)
        ours.put(slot, deltas)
        exact.put(slot, deltas)
    return ours, exact


def check_parity(device: torch.device, dtype: torch.dtype) -> None:
    """More rows and ranks than a tile, rows of a wider matrix, outputs in the dtype and in float32."""
    torch.manual_seed(0)
    ours, exact = sites(device, dtype)
    slots = np.array([0, 2, 1, 3, 1, 0, 2] + [1] * 20)
    rows = StepRows(slots, device)
    inputs = torch.randn(len(slots), COLUMNS + 8).to(device, dtype)[:, :COLUMNS]
    for kind in (dtype, torch.float32):
        outputs = torch.randn(len(slots), NUM_OUTS).to(device, kind)
        right = outputs.clone()
        ours.add(outputs, inputs, rows)
        exact.add(right, inputs, rows)
        torch.testing.assert_close(outputs, right, atol=0.02, rtol=0.01)
        assert torch.equal(outputs[0], right[0])


def check_rows_alone(device: torch.device, dtype: torch.dtype) -> None:
    """A row's bits do not depend on the others."""
    torch.manual_seed(0)
    ours, _ = sites(device, dtype)
    slots = np.array([1, 2, 1, 3, 0])
    inputs, outputs = torch.randn(5, COLUMNS).to(device, dtype), torch.zeros(5, NUM_OUTS, dtype=dtype, device=device)
    ours.add(outputs, inputs, StepRows(slots, device))
    for row in range(4):
        alone = torch.zeros(1, NUM_OUTS, dtype=dtype, device=device)
        ours.add(alone, inputs[row : row + 1], StepRows(slots[row : row + 1], device))
        assert torch.equal(alone[0], outputs[row])
    assert len({tuple(output) for output in outputs.tolist()}) == 5


CHECKS = (check_parity, check_rows_alone)
