"""What blocks are made of. Inputs of layers are (num_tokens, features) in the model's dtype."""

from collections.abc import Callable
from typing import Protocol

import torch

from weft.engine.layers.attention import PagedCache

Layer = Callable[[torch.Tensor], torch.Tensor]

HeadLayer = Callable[[torch.Tensor, torch.Tensor, PagedCache | None], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(num_tokens, num_heads + 2 * num_kv_heads, head_dim), the rotation of each token, from `RotaryTable.gather`, and
`AttentionStep.cache` -> queries, keys, values. May change its first argument; writes keys and values to the cache."""


class Linear(Protocol):
    """A matrix of the model, possibly several that share their input, stacked along the outputs."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""

    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add the layer's outputs to residual (num_tokens, out_features)."""

    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer's outputs in float32, which the caller may overwrite, and the next call may, too."""
