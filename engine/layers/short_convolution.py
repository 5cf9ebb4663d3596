"""A mixer that is a short convolution between two gates (LFM2: Liquid AI, 2025)."""

from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.layers.block import BlockStep, Mixer
from weft.engine.layers.convolution import CausalConvolution
from weft.engine.layers.parts import Linear


@dataclass(frozen=True, slots=True)
class ShortConvolution(Mixer):
    """Gates are products without an activation.

    Attributes:
        inputs: (num_tokens, hidden_size) -> first gate, second gate, values, each (num_tokens, channels).
        cache: Index of the convolution's cache in the model.
    """

    inputs: Linear
    convolution: CausalConvolution
    output: Linear
    cache: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        states = step.caches.states
        assert states is not None
        before, after, values = self.inputs(normed).chunk(3, 1)
        return self.convolution.step(before * values, states, self.cache).mul_(after)

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.output.add_to(residual, mixed)
