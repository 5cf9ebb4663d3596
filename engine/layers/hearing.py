"""What an encoder of sound has in the place of an embedding: features of samples, then convolutions over time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.engine.batch import Samples

Features = Callable[[Samples], torch.Tensor]
"""Features of one input, (num_features, num_frames) float32 on the CPU."""


@dataclass(frozen=True, slots=True)
class ConvolutionLayer:
    """One convolution of one input, (inputs, length) -> (outputs, new length).

    Attributes:
        weight: (outputs, inputs, size).
        norm: Weight and bias of a norm over all values behind the activation, (outputs,) each; None for none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: int
    padding: int
    activation: Callable[[torch.Tensor], torch.Tensor]
    norm: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """As above."""
        made = self.activation(F.conv1d(values[None], self.weight, self.bias, self.stride, self.padding))
        return (made if self.norm is None else F.group_norm(made, 1, *self.norm))[0]


@dataclass(frozen=True, slots=True)
class Front:
    """Hidden states of inputs, one after another, each by itself: (num_positions in all, hidden_size)."""

    features: Features
    convolutions: tuple[ConvolutionLayer, ...]
    scale: float
    dtype: torch.dtype

    def __call__(self, sounds: Sequence[Samples]) -> torch.Tensor:
        """As above."""
        return torch.cat([self._read(samples) for samples in sounds])

    def _read(self, samples: Samples) -> torch.Tensor:
        weight = self.convolutions[0].weight
        values = self.features(samples).to(weight.device, weight.dtype)
        for convolution in self.convolutions:
            values = convolution(values)
        return (values.T * self.scale).to(self.dtype)
