"""The first half of a feed-forward layer, with a gate or without; gate and up projection are one matrix, gate first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.layers.parts import Layer


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
