"""Softmax attention whose outputs are multiplied by a sigmoid gate of the layer's input (Qiu et al., 2025)."""

from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.layers.block import Attention, BlockStep, Mixer


@dataclass(frozen=True, slots=True)
class GatedAttention(Mixer):
    """Attention whose `qkv` makes the gate, too, behind queries, keys and values.

    Attributes:
        num_heads: Heads of queries.
        gate_size: Values of the gate of a token.
    """

    attention: Attention
    num_heads: int
    gate_size: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        projected = self.attention.qkv(normed)
        qkv, gate = projected.split_with_sizes((projected.size(1) - self.gate_size, self.gate_size), 1)
        outputs = self.attention.attend(qkv.contiguous(), step)
        by_head = outputs.view(-1, self.num_heads, self.attention.head_dim)
        by_head *= gate.sigmoid().view(-1, self.num_heads, self.gate_size // self.num_heads)
        return outputs

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.attention.add_to(residual, mixed)
