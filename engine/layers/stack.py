"""The layers of a decoder, and what a layer consists of.

Inputs of layers are (num_tokens, features) in the model's dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.backend import AttentionStep, PagedCache

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


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The parts of one layer.

    Attributes:
        qkv: Queries, keys and values stacked, ((num_heads + 2 * num_kv_heads) * head_dim, hidden_size).
        heads: QK-norm, in families that have it, and rotary embedding.
        gated: The feed-forward layer up to its inner size.
    """

    input_norm: Layer
    qkv: Linear
    heads: HeadLayer
    o: Linear
    mlp_norm: Layer
    gated: Layer
    down: Linear


class LayerStack(Protocol):
    """All layers of a decoder."""

    def run(
        self, hidden: torch.Tensor, rotation: torch.Tensor, attention: AttentionStep, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states (num_tokens, hidden_size), which may be changed -> those behind the last layer, of `rows`.

        Args:
            rotation: Of each token, from `RotaryTable.gather`.
            attention: Writes and reads the KV cache of this step.
            rows: See `Decoder.forward`.
        """


class PlainStack:
    """Calls one part after the other."""

    def __init__(self, layers: Sequence[DecoderLayer], head_dim: int) -> None:
        """Take the layers in their order."""
        self._layers = layers
        self._head_dim = head_dim

    def run(
        self, hidden: torch.Tensor, rotation: torch.Tensor, attention: AttentionStep, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """See `LayerStack`."""
        return self.run_from(0, hidden, rotation, attention, rows)

    def run_from(
        self,
        first: int,
        hidden: torch.Tensor,
        rotation: torch.Tensor,
        attention: AttentionStep,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run layer `first` and those behind it; the rest is as in `run`."""
        num_tokens, last = hidden.size(0), len(self._layers) - 1
        for index in range(first, len(self._layers)):
            layer = self._layers[index]
            qkv = layer.qkv(layer.input_norm(hidden)).view(num_tokens, -1, self._head_dim)
            heads = layer.heads(qkv, rotation, attention.cache(index))
            attended = attention.attend(index, *heads).reshape(num_tokens, -1)
            if rows is not None and index == last:
                hidden, attended = hidden[rows], attended[rows]
                if not len(rows):
                    return hidden
            layer.o.add_to(hidden, attended)
            layer.down.add_to(hidden, layer.gated(layer.mlp_norm(hidden)))
        return hidden
