"""The types of the layers that blocks are made of; inputs are (num_tokens, features) in the model's dtype."""

from collections.abc import Callable
from typing import Protocol

import torch

from weft.engine.layers.attention import PagedCache

Layer = Callable[[torch.Tensor], torch.Tensor]

# Takes (num_tokens, num_heads + 2 * num_kv_heads, head_dim), the rotation of each token from `RotaryTable.gather`, and
# `AttentionStep.cache`. Returns queries, keys and values. May change its first argument. Writes K/V to the cache unless
# that is None.
HeadLayer = Callable[[torch.Tensor, torch.Tensor, PagedCache | None], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Linear(Protocol):
    """A matrix of the model, or several that share their input, stacked along the outputs."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""

    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add the outputs to residual (num_tokens, out_features), in place."""

    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs in float32. The caller may overwrite them, and so may the next call."""
