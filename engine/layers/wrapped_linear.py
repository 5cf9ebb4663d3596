"""Linear layers around linear layers: another order of inputs, and what follows the outputs.

Some families scale, normalise or cap what a matrix gives; some quantized matrices keep their inputs in an order of
their own.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.layers.block import Layer, Linear
from weft.engine.layers.feed_forward import Activated


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


@dataclass(frozen=True, slots=True)
class LinearWithEpilogue(Linear):
    """A linear layer followed by another layer, which may change its input."""

    linear: Linear
    epilogue: Layer

    @override
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.epilogue(self.linear(inputs))

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        residual += self(inputs)

    @override
    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.epilogue(self.linear.to_float32(inputs))


def clamped(layer: Layer, bound: float) -> Layer:
    """Keep the layer's outputs between -bound and bound."""
    return lambda inputs: layer(inputs).clamp_(-bound, bound)


def scaled(layer: Layer, factor: float) -> Layer:
    """Multiply the layer's outputs by factor."""
    return lambda inputs: layer(inputs).mul_(factor)


def added(bias: torch.Tensor) -> Layer:
    """Add bias to values, in place."""
    return lambda values: values.add_(bias)


def padded(num_ids: int) -> Layer:
    """Put so many logits behind the others that their ids are as good as never drawn."""
    return lambda logits: F.pad(logits, (0, num_ids), value=-1e30)


def shifted(layer: Layer, offset: int) -> Layer:
    """Add offset to the layer's inputs."""
    return lambda inputs: layer(inputs + offset)


def soft_cap(cap: float) -> Layer:
    """Values -> cap * tanh(values / cap), in place: about the same near zero, never beyond the cap."""
    return lambda values: values.div_(cap).tanh_().mul_(cap)
