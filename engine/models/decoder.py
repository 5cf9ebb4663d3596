"""The one decoder: embedding, pre-norm layers of attention and gated feed-forward, final norm, output head.

Families differ in data only (`ModelConfig`). Layers get queries, keys and values attended by the `AttentionStep` that
the caller passes in; nothing here knows the cache. All tensors are flat over the tokens of a step. The caller runs
everything under `torch.inference_mode`.
"""

from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionStep, KVSpec
from engine.layers.rotary import RotaryTable
from engine.layers.stack import Layer, LayerStack, Linear
from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All parts of a decoder, and the bytes that their weights take."""

    embedding: Layer
    layers: LayerStack
    norm: Layer
    head: Linear
    rotary: RotaryTable
    num_bytes: int


def kv_specs(config: ModelConfig) -> tuple[KVSpec, ...]:
    """What each layer keeps per token."""
    return tuple(
        KVSpec(config.num_kv_heads, config.head_dim, window, config.attention_scale, config.attention_soft_cap)
        for window in config.sliding_windows
    )


class Decoder:
    """A model ready to run on one device. Made by `engine.weights.load_weights`."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        """Put weights of the shapes that config gives into place; `weights_bytes` says what they take."""
        self.config = config
        self.kv_specs = kv_specs(config)
        self.weights_bytes = weights.num_bytes
        self._weights = weights

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the tokens of one step through all layers.

        Args:
            token_ids: (num_tokens,) int64.
            positions: (num_tokens,) int64, position of each token in its request.
            attention: Writes and reads the KV cache of this step.
            rows: (num_rows,) indices of the tokens whose hidden states are wanted; None for all. Of the others the last
                layer computes no more than attention: three quarters of its matrices are for nothing there.

        Returns:
            (num_rows, hidden_size) hidden states after the final norm, in the model's dtype.
        """
        hidden, rotation = self._weights.embedding(token_ids), self._weights.rotary.gather(positions)
        hidden = self._weights.layers.run(hidden, rotation, attention, rows)
        return self._weights.norm(hidden) if hidden.size(0) else hidden  # an empty launch is an error on CUDA

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) hidden states of `forward` -> (num_rows, vocab_size) float32, until the next call."""
        return self._weights.head.to_float32(hidden)
