"""Gated feed-forward layer. Gate and up projection are one matrix, gate first."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from engine.layers.linear import Linear

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""By their name in config.json."""


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        """Stack gate_up (2 * intermediate_size, hidden_size) and down; `activation` is a key of ACTIVATIONS."""
        self.gate_up = gate_up
        self.down = down
        self._activation = ACTIVATIONS[activation]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> the same."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)  # (num_tokens, intermediate_size) each
        return self.down(self._activation(gate).mul_(up))
