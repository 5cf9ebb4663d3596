"""The first half of a gated feed-forward layer; gate and up projection are one matrix, gate first."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from weft.engine.layers.parts import Layer

# By their names in config.json.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def gated(gate_up: Layer, activation: str) -> Layer:
    """activation(gate(x)) * up(x).

    Args:
        gate_up: (num_tokens, hidden_size) -> (num_tokens, 2 * intermediate_size), gate first.
        activation: A key of ACTIVATIONS.

    Returns:
        (num_tokens, hidden_size) -> (num_tokens, intermediate_size).
    """
    activate = ACTIVATIONS[activation]

    def run(hidden: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up(hidden).chunk(2, dim=-1)  # (num_tokens, intermediate_size) each
        return activate(gate).mul_(up)

    return run
