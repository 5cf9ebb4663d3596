"""Softmax attention whose scores grow with the position of the query (scalable softmax: Nakanishi, 2025)."""

from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.layers.block import Attention, BlockStep, Mixer


class TemperatureTable:
    """The factor on the queries of every position below max_model_len: 1 + strength * log(1 + periods before it)."""

    def __init__(self, strength: float, period: int, offset: int, max_model_len: int, device: torch.device) -> None:
        """Compute (max_model_len, 1) in float32; offset is added to positions before periods are counted."""
        periods = torch.arange(offset, max_model_len + offset).div(period, rounding_mode="floor")
        self._rows = (1 + strength * torch.log1p(periods.float())).unsqueeze(1).to(device)

    def gather(self, positions: torch.Tensor) -> torch.Tensor:
        """(num_tokens, 1) float32 of positions (num_tokens,)."""
        return self._rows.index_select(0, positions)


@dataclass(frozen=True, slots=True)
class TunedAttention(Mixer):
    """Attention whose queries are multiplied by the factors of their positions, which turning them does not change.

    Attributes:
        query_size: Values of the queries of a token, which come first in what `qkv` makes.
        table: Index of the `TemperatureTable` among the model's tables of positions.
    """

    attention: Attention
    query_size: int
    table: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        qkv = self.attention.qkv(normed)
        qkv[:, : self.query_size] *= step.rotations[self.table]
        return self.attention.attend(qkv, step)

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.attention.add_to(residual, mixed)
