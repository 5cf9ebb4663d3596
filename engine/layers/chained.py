"""What some families put behind a layer, so that no stack or decoder needs to know: a scale, a norm, a soft cap."""

import torch

from weft.engine.layers.parts import Layer, Linear


class ChainedLinear:
    """A linear layer and what becomes of its outputs; see `Linear`."""

    def __init__(self, linear: Linear, follower: Layer) -> None:
        """Let follower, which may change its argument, take what linear gives."""
        self._linear = linear
        self._follower = follower

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""
        return self._follower(self._linear(inputs))

    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        """See `Linear`."""
        residual += self(inputs)

    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return self._follower(self._linear.to_float32(inputs))


def scaled(layer: Layer, factor: float) -> Layer:
    """The layer's outputs times factor."""
    return lambda inputs: layer(inputs).mul_(factor)


def soft_cap(cap: float) -> Layer:
    """Values -> cap * tanh(values / cap), in place: hardly different near zero, never beyond the cap."""
    return lambda values: values.div_(cap).tanh_().mul_(cap)
