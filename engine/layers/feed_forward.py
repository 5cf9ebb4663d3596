"""Feed-forward layers: activations and gates. Gate and up projection are one matrix, gate first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.families.experts import Gating
from weft.engine.layers.block import Layer

# On the CPU torch's own sigmoid and softplus round otherwise in vectors than in what is left over. There a result would
# depend on where its value lies, and so on the other rows of a step. `exp` and `log1p` have no such fault.


def sigmoid(values: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-values))."""
    return values.sigmoid() if values.is_cuda else values.neg().exp_().add_(1).reciprocal_()


def softplus(values: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(values)), which is values above 20."""
    return F.softplus(values) if values.is_cuda else torch.where(values > 20, values, values.exp().log1p_())


def _squared_relu(values: torch.Tensor) -> torch.Tensor:
    """So et al., 2021."""
    return F.relu(values).square_()


def _quick_gelu(values: torch.Tensor) -> torch.Tensor:
    return values * torch.sigmoid(1.702 * values)


# By their names in config.json, the first one that is equal.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _squared_relu,
}


# Further names of the same functions, up to rounding.
ALIASES: Mapping[str, str] = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
}


class Activated(Protocol):
    """A matrix and what follows it. Called, it does both at once; one after the other leaves room between them."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, intermediate_size)."""

    def sums(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the matrix makes, gate first, in the dtype of the inputs or float32; the caller may change it."""

    def activate(self, sums: torch.Tensor) -> torch.Tensor:
        """The rest."""


@dataclass(frozen=True, slots=True)
class ActivatedLinear(Activated):
    """One layer after the other, unless something fused does the same."""

    linear: Layer
    activation: Layer
    fused: Layer | None = None

    @override
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.fused(inputs) if self.fused else self.activation(self.linear(inputs))

    @override
    def sums(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs)

    @override
    def activate(self, sums: torch.Tensor) -> torch.Tensor:
        return self.activation(sums)


def gated(gate_up: Layer, activation: str) -> ActivatedLinear:
    """activation(gate(x)) * up(x).

    Args:
        gate_up: (num_tokens, hidden_size) -> (num_tokens, 2 * intermediate_size), gate first.
        activation: A key of ACTIVATIONS.
    """
    activate = ACTIVATIONS[activation]

    def join(sums: torch.Tensor) -> torch.Tensor:
        gate, up = sums.chunk(2, dim=-1)  # (num_tokens, intermediate_size) each
        return activate(gate).mul_(up)

    return ActivatedLinear(gate_up, join)


def ungated(up: Layer, activation: str, fused: Layer | None = None) -> ActivatedLinear:
    """activation(up(x)), (num_tokens, hidden_size) -> (num_tokens, intermediate_size)."""
    return ActivatedLinear(up, ACTIVATIONS[activation], fused)


class Experts(Protocol):
    """The experts of a layer, made by `LayerKernels`. No expert computes other tokens than its own."""

    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> None:
        """Add the outputs of each token's experts, each times its share, in place.

        Args:
            residual: (num_tokens, hidden_size).
            inputs: (num_tokens, hidden_size).
            ids: (num_tokens, num_chosen), int64.
            shares: (num_tokens, num_chosen), float32.
        """


def join(gating: Gating, values: torch.Tensor) -> torch.Tensor:
    """Values between the matrices, (num_rows, num_parts * inner size), gate first -> (num_rows, inner size)."""
    activate = ACTIVATIONS[gating.activation]
    if not gating.has_gate:
        return activate(values)
    gate, up = values.chunk(2, dim=-1)
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    gate = activate(gate) if gating.slope == 1.0 else gate * torch.sigmoid(gating.slope * gate)
    return gate * (up + gating.up_offset if gating.up_offset else up)
