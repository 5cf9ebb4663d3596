"""Layers that attend to the keys and values of an earlier layer, and layers whose keys and values are read so.

An earlier layer writes them to its cache and leaves those of the step for the layers that share them.
"""

from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.layers.attention import PagedCache
from weft.engine.layers.block import Attention, BlockStep, Mixer
from weft.engine.layers.norm import normalise
from weft.engine.layers.parts import HeadLayer, Layer, Linear
from weft.engine.layers.rotary import rotate


@dataclass(frozen=True, slots=True)
class NormedValues:
    """A `HeadLayer` that divides each head of the values by its root mean square, before another one does the rest."""

    heads: HeadLayer
    num_kv_heads: int
    eps: float

    def __call__(
        self, qkv: torch.Tensor, rotation: torch.Tensor, cache: PagedCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `HeadLayer`."""
        values = qkv[:, -self.num_kv_heads :]
        values.copy_(normalise(values, self.eps))
        return self.heads(qkv, rotation, cache)


@dataclass(frozen=True, slots=True)
class SharingAttention(Mixer):
    """Attention that leaves its keys and values for later layers."""

    attention: Attention

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        own, attention = self.attention, step.caches.attention
        qkv = own.qkv(normed).view(len(normed), -1, own.head_dim)
        queries, keys, values = own.heads(qkv, step.rotations[own.rotation], attention.cache(own.cache))
        step.caches.passed[f"cache {own.cache}"] = keys, values
        return attention.attend(own.cache, queries, keys, values).reshape(len(normed), -1)

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.attention.add_to(residual, mixed)


@dataclass(frozen=True, slots=True)
class ReadingAttention(Mixer):
    """Attention with queries alone, to the keys and values of an earlier layer.

    Attributes:
        queries: (num_heads * head_dim, hidden_size).
        norm: Over each head.
        cache: Of the earlier layer; what the step added to it may be written there again.
        rotation: See `Attention`.
    """

    queries: Linear
    norm: Layer
    o: Linear
    head_dim: int
    cache: int
    rotation: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        queries = self.norm(self.queries(normed).view(len(normed), -1, self.head_dim))
        keys, values = step.caches.passed[f"cache {self.cache}"]
        rotated = rotate(queries, step.rotations[self.rotation])
        return step.caches.attention.attend(self.cache, rotated, keys, values).reshape(len(normed), -1)

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.o.add_to(residual, mixed)
