"""The one decoder: embedding, pre-norm layers of attention and gated feed-forward, final norm, output head.

Families differ in data only (`ModelConfig`). Layers get queries, keys and values attended by the `AttentionStep` that
the caller passes in; nothing here knows the cache. All tensors are flat over the tokens of a step. The caller runs
everything under `torch.inference_mode`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionStep, KVSpec
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.rotary import RotaryTable, rotate
from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer.

    Attributes:
        qkv: Queries, keys and values stacked, ((num_heads + 2 * num_kv_heads) * head_dim, hidden_size).
        head_norm: None in families without QK-norm.
    """

    input_norm: RMSNorm
    qkv: Linear
    head_norm: HeadNorm | None
    o: Linear
    mlp_norm: RMSNorm
    mlp: GatedMLP


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, and the bytes they take.

    With tied embeddings the head shares the table's memory, or is a packed copy of it.
    """

    embedding: torch.Tensor
    layers: Sequence[DecoderLayer]
    norm: RMSNorm
    head: Linear
    rotary: RotaryTable
    num_bytes: int


def kv_specs(config: ModelConfig) -> tuple[KVSpec, ...]:
    """What each layer keeps per token."""
    return tuple(KVSpec(config.num_kv_heads, config.head_dim, window) for window in config.sliding_windows)


class Decoder:
    """A model ready to run on one device. Made by `engine.weights.load_weights`."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        """Put weights of the shapes that config gives into place; `weights_bytes` says what they take."""
        self.config = config
        self.kv_specs = kv_specs(config)
        self.weights_bytes = weights.num_bytes
        self._weights = weights

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionStep) -> torch.Tensor:
        """Run the tokens of one step through all layers.

        Args:
            token_ids: (num_tokens,) int64.
            positions: (num_tokens,) int64, position of each token in its request.
            attention: Writes and reads the KV cache of this step.

        Returns:
            (num_tokens, hidden_size) hidden states after the final norm, in the model's dtype.
        """
        hidden = F.embedding(token_ids, self._weights.embedding)
        rotation = self._weights.rotary.gather(positions)
        for index, layer in enumerate(self._weights.layers):
            hidden += self._attend(index, layer, layer.input_norm(hidden), rotation, attention)
            hidden += layer.mlp(layer.mlp_norm(hidden))
        return self._weights.norm(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) hidden states of `forward` -> (num_rows, vocab_size) float32."""
        return self._weights.head(hidden).float()

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionStep,
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        num_tokens = hidden.shape[0]
        qkv = layer.qkv(hidden).view(num_tokens, -1, self.config.head_dim)
        # Queries and keys go through norm and rotation as one tensor: half as many operations.
        heads, values = qkv.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.head_norm is not None:
            heads = layer.head_norm(heads)
        queries, keys = rotate(heads, *rotation).split_with_sizes((num_heads, num_kv_heads), dim=1)
        attended = attention.attend(index, queries, keys, values)
        return layer.o(attended.reshape(num_tokens, -1))
