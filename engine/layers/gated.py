"""What stands around the matrices of a model: functions of their outputs, gates, and another order of their inputs.

- Activations, and the first half of a feed-forward layer, with a gate or without. Gate and up projection are one
  matrix, gate first.
- `ActOrderLinear`: matrices that keep their inputs in another order than the model.
- `LinearWithEpilogue` and functions for it: outputs that are scaled, normalised or capped, as some families ask for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.layers.block import Layer, Linear

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


class ActOrderLinear(Linear):
    """A matrix; `order`, (in_features,) int64, has for each of its inputs the one of the model.

    Its order is that of the groups which share scales. GPTQ's `desc_act` (arXiv:2210.17323) quantizes the inputs that
    matter most first, so that a group is of inputs from anywhere (`g_idx`). Side by side, they are groups as kernels
    take them.

    It is also `Activated` where the inner one is.
    """

    def __init__(self, inner: Linear, order: torch.Tensor) -> None:
        """Take the matrix in its own order."""
        self.inner, self.order = inner, order

    @override
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs.index_select(1, self.order))

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        self.inner.add_to(residual, inputs.index_select(1, self.order))

    @override
    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner.to_float32(inputs.index_select(1, self.order))

    def sums(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `Activated`."""
        return cast(Activated, self.inner).sums(inputs.index_select(1, self.order))

    def activate(self, sums: torch.Tensor) -> torch.Tensor:
        """See `Activated`."""
        return cast(Activated, self.inner).activate(sums)


class LinearWithEpilogue(Linear):
    """A linear layer followed by another layer."""

    def __init__(self, linear: Linear, epilogue: Layer) -> None:
        """Apply epilogue, which may change its input, to the outputs of linear."""
        self._linear = linear
        self._epilogue = epilogue

    @override
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._epilogue(self._linear(inputs))

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        residual += self(inputs)

    @override
    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._epilogue(self._linear.to_float32(inputs))


def clamped(layer: Layer, bound: float) -> Layer:
    """Keep the layer's outputs between -bound and bound."""
    return lambda inputs: layer(inputs).clamp_(-bound, bound)


def scaled(layer: Layer, factor: float) -> Layer:
    """Multiply the layer's outputs by factor."""
    return lambda inputs: layer(inputs).mul_(factor)


def shifted(layer: Layer, offset: int) -> Layer:
    """Add offset to the layer's inputs."""
    return lambda inputs: layer(inputs + offset)


def soft_cap(cap: float) -> Layer:
    """Values -> cap * tanh(values / cap), in place: about the same near zero, never beyond the cap."""
    return lambda values: values.div_(cap).tanh_().mul_(cap)
