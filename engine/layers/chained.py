"""Layers whose outputs are scaled, normalised or capped, as some families ask for."""

import torch
from typing_extensions import override

from weft.engine.layers.parts import Layer, Linear


class ChainedLinear(Linear):
    """A linear layer followed by another layer."""

    def __init__(self, linear: Linear, follower: Layer) -> None:
        """Apply follower, which may change its input, to the outputs of linear."""
        self._linear = linear
        self._follower = follower

    @override
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._follower(self._linear(inputs))

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        residual += self(inputs)

    @override
    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._follower(self._linear.to_float32(inputs))


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
