"""The first half of a feed-forward layer, with a gate or without; gate and up projection are one matrix, gate first."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

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


def ungated(up: Layer, activation: str) -> Layer:
    """activation(up(x)), (num_tokens, hidden_size) -> (num_tokens, intermediate_size)."""
    activate = ACTIVATIONS[activation]
    return lambda hidden: activate(up(hidden))
