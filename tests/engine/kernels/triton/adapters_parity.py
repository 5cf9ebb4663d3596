"""Checks of `weft.engine.kernels.triton.products` against torch's sums, on any device."""

import dataclasses

import numpy as np
import torch

from tests.engine.kernels import experts_reference
from weft.engine.kernels.torch.layer_kernels import TorchExperts, TorchSite
from weft.engine.kernels.triton.products import TritonExperts, TritonSite
from weft.engine.lora.adapted_layers import AdaptedExperts, AdapterStep, Delta, StepRows
from weft.engine.runner.dummy_batch import dummy_batch

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


def check_experts(device: torch.device, dtype: torch.dtype) -> None:
    """Those of Triton could not be used one by one, so that every step with an adapter failed."""
    torch.manual_seed(0)
    weights, gating = (
        experts_reference.draw(3, 32, 24, dtype, device, has_bias=True),
        experts_reference.GATINGS["limited"],
    )
    parts = weights.gate_up, weights.gate_up_bias, weights.down, weights.down_bias, gating
    sizes, step = [(48, 32)] * 3 + [(32, 24)] * 3, AdapterStep(device)
    ours, exact = [TritonSite(size, 1, 2, 8, dtype, device) for size in sizes], [TorchSite(0) for _ in sizes]
    for slot in (1, 2):
        for own, right, (num_outs, columns) in zip(ours, exact, sizes, strict=True):
            a, b = (torch.randn(*shape).to(device, dtype) * 0.2 for shape in ((8, columns), (num_outs, 8)))
            own.put(slot, [Delta(0, a, b)])
            right.put(slot, [Delta(0, a, b)])
    experts = (
        AdaptedExperts(TritonExperts(*parts, is_deterministic=False, is_dependent=False), ours[:3], ours[3:], step),
        AdaptedExperts(TorchExperts(*parts), exact[:3], exact[3:], step),
    )
    ids = next(experts_reference.routes(5, 3, 2)).to(device)
    inputs, shares = torch.randn(5, 32).to(device, dtype), torch.rand(5, 2, device=device)
    results = [torch.zeros(5, 32, dtype=dtype, device=device) for _ in experts]
    with step.of(dataclasses.replace(dummy_batch(5, (), 1, 1, 1), adapters=np.array([1, 0, 2, 1, 0]))):
        for each, sums in zip(experts, results, strict=True):
            each.add_to(sums, inputs, ids, shares)
    torch.testing.assert_close(results[0], results[1], atol=0.04, rtol=0.01)


CHECKS = (check_parity, check_rows_alone, check_experts)
