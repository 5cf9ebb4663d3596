"""Checks of `weft.engine.kernels.triton.products` against float64, on any device: Triton's interpreter or a GPU."""

import torch

from tests.engine.kernels.experts_reference import GATINGS, Weights, draw, exact, routes
from weft.engine.families.experts import Gating
from weft.engine.kernels.triton.products import TritonExperts

ROWS = (1, 40)


def make(weights: Weights, gating: Gating, *, is_deterministic: bool) -> TritonExperts:
    parts = weights.gate_up, weights.gate_up_bias, weights.down, weights.down_bias
    return TritonExperts(*parts, gating, is_deterministic=is_deterministic, is_dependent=False)


def check_parity(device: torch.device, dtype: torch.dtype) -> None:
    """Sizes that are no multiples of a tile, with biases and without."""
    torch.manual_seed(0)
    for name, is_deterministic in (("plain", False), ("limited", False), ("limited", True)):
        weights = draw(5, 72, 40, dtype, device, has_bias=name != "plain")
        experts = make(weights, GATINGS[name], is_deterministic=is_deterministic)
        for num_rows in ROWS:
            for ids in routes(num_rows, 5, 3):
                inputs, residual = (torch.randn(num_rows, 72).to(device, dtype) for _ in range(2))
                shares, sums = torch.rand(num_rows, 3, device=device), residual.clone()
                experts.add_to(sums, inputs, ids.to(device), shares)
                right = residual.double().cpu() + exact(weights, GATINGS[name], inputs, ids, shares)
                torch.testing.assert_close(sums.double().cpu(), right, atol=0.04, rtol=0.01)


def check_activations(device: torch.device, dtype: torch.dtype) -> None:
    """One that Weft's kernel does not know is torch's: it ended the start."""
    torch.manual_seed(0)
    weights, gating = draw(2, 32, 16, dtype, device, has_bias=False), Gating("relu")
    inputs, ids, shares = torch.randn(3, 32).to(device, dtype), next(routes(3, 2, 1)), torch.rand(3, 1, device=device)
    sums = torch.zeros_like(inputs)
    make(weights, gating, is_deterministic=False).add_to(sums, inputs, ids.to(device), shares)
    right = exact(weights, gating, inputs, ids, shares)
    torch.testing.assert_close(sums.double().cpu(), right, atol=0.04, rtol=0.01)


def check_rows_alone(device: torch.device, dtype: torch.dtype) -> None:
    """If it is deterministic, a row's bits do not depend on the others."""
    torch.manual_seed(0)
    weights = draw(4, 64, 48, dtype, device, has_bias=False)
    experts = make(weights, GATINGS["plain"], is_deterministic=True)
    inputs, ids = torch.randn(40, 64).to(device, dtype), torch.rand(40, 4).argsort(1)[:, :2].to(device)
    shares, together = torch.rand(40, 2, device=device), torch.zeros(40, 64, device=device, dtype=dtype)
    alone = together.clone()
    experts.add_to(together, inputs, ids, shares)
    for row in range(0, 40, 13):
        one = slice(row, row + 1)
        experts.add_to(alone[one], inputs[one], ids[one], shares[one])
        assert torch.equal(alone[one], together[one])


CHECKS = (check_parity, check_activations, check_rows_alone)
