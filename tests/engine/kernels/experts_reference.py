"""Layers of experts in float64, each expert for all tokens, and the ways in which tokens may be spread over them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weft.engine.families.experts import Gating
from weft.engine.layers.feed_forward import join

GATINGS = {"plain": Gating(), "limited": Gating(limit=2.0, slope=1.702, up_offset=1.0)}


@dataclass(frozen=True)
class Weights:
    """Of all experts, in the order of `given_experts`; biases may be None."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    @property
    def all(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        return self.gate_up, self.down, self.gate_up_bias, self.down_bias


def draw(
    num_experts: int, hidden_size: int, size: int, dtype: torch.dtype, device: torch.device, *, has_bias: bool
) -> Weights:
    """Random weights whose outputs are around 1."""

    def values(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape) * scale).to(device, dtype)

    return Weights(
        values(num_experts, 2 * size, hidden_size, scale=hidden_size**-0.5),
        values(num_experts, hidden_size, size, scale=size**-0.5),
        values(num_experts, 2 * size) if has_bias else None,
        values(num_experts, hidden_size) if has_bias else None,
    )


def exact(
    weights: Weights, gating: Gating, inputs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """What is to be added to the residual, in float64."""
    gate_up, down, first, second = (None if part is None else part.double().cpu() for part in weights.all)
    assert gate_up is not None and down is not None
    sums = torch.zeros(len(inputs), down.size(1), dtype=torch.float64)
    for expert in range(len(down)):
        values = inputs.double().cpu() @ gate_up[expert].T + (0 if first is None else first[expert])
        outputs = join(gating, values) @ down[expert].T + (0 if second is None else second[expert])
        sums += outputs * (shares.double() * (ids == expert)).sum(1, keepdim=True).cpu()
    return sums


def routes(num_rows: int, num_experts: int, num_chosen: int) -> Iterator[torch.Tensor]:
    """Ids (num_rows, num_chosen): anyhow, all tokens to the same experts, and one expert that only the last has."""
    yield torch.rand(num_rows, num_experts).argsort(1)[:, :num_chosen]
    yield torch.arange(num_chosen).flip(0).repeat(num_rows, 1)
    ids = torch.arange(num_chosen).repeat(num_rows, 1)
    ids[-1, 0] = num_experts - 1
    yield ids
