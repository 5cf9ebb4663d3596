"""First half of a gated feed-forward layer. Gate and up projection are one matrix, gate first."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""By their name in config.json."""


class TorchGated:
    """activation(gate(x)) * up(x)."""

    def __init__(self, gate_up: Callable[[torch.Tensor], torch.Tensor], activation: str) -> None:
        """Take gate_up (2 * intermediate_size, hidden_size); `activation` is a key of ACTIVATIONS."""
        self.gate_up = gate_up
        self._activation = ACTIVATIONS[activation]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, intermediate_size)."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)  # (num_tokens, intermediate_size) each
        return self._activation(gate).mul_(up)
