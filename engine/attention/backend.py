"""The seam between the model and paged attention.

A backend alone owns shape, write and copy of its KV cache. The model hands it queries, keys and values of one layer
and gets the attention output back; block tables and slots reach the backend through `begin`, once per step, never
through a global.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import Batch


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer keeps per token, and how it is attended to. Equal specs form a KV group and share block tables.

    Attributes:
        num_kv_heads: Heads of K and of V.
        head_dim: Values per head.
        sliding_window: A token sees itself and the sliding_window - 1 tokens before it; None means all before it.
        scale: What scores are multiplied with; None means head_dim ** -0.5.
        soft_cap: Scaled scores become soft_cap * tanh(score / soft_cap) before any is masked; None leaves them alone.
    """

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None

    @property
    def score_scale(self) -> float:
        """What scores are multiplied with."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True)
class KVGroup:
    """The layers (ascending indices) that share one spec."""

    spec: KVSpec
    layers: tuple[int, ...]

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers of the group, K and V."""
        values = 2 * block_size * self.spec.num_kv_heads * self.spec.head_dim
        return values * dtype.itemsize * len(self.layers)


def group_layers(specs: tuple[KVSpec, ...]) -> tuple[KVGroup, ...]:
    """Group layers by equal spec, in order of first appearance."""
    layers: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers.setdefault(spec, []).append(layer)
    return tuple(KVGroup(spec, tuple(indices)) for spec, indices in layers.items())


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Where a layer puts K/V that it prepares.

    Attributes:
        blocks: (num_blocks, 2, num_kv_heads, block_size, head_dim), with 2 for keys and values.
        slots: (num_tokens,) int32, block * block_size + place in it; -1 writes nothing.
    """

    blocks: torch.Tensor
    slots: torch.Tensor


class AttentionStep(Protocol):
    """Attention for the batch of one step; made by `AttentionBackend.begin`, used once per layer."""

    def cache(self, layer: int) -> PagedCache | None:
        """Where K/V of a layer must have been written when it attends; None where `attend` writes them."""

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write keys and values to the cache, unless `cache` tells others to, then attend causally.

        Each token sees its request's context.

        Args:
            layer: Index of the layer.
            queries: (num_tokens, num_heads, head_dim), rotary embedding applied.
            keys: (num_tokens, num_kv_heads, head_dim), rotary embedding applied.
            values: (num_tokens, num_kv_heads, head_dim).

        Returns:
            (num_tokens, num_heads, head_dim), valid until the next call: the memory may be used again.
        """


class AttentionBackend(Protocol):
    """Owns the KV cache tensors of all layers. Constructed with groups, number of blocks, block size, dtype, device.

    Attributes:
        supports_graphs: Whether steps of one token a request may be recorded and replayed (`engine.cuda_graphs`).
            `begin` then writes a batch to device memory that stays where it is, without waiting for the device; what
            `attend` launches in such a step depends on the number of requests alone; and a request of length 0, whose
            slot is -1, is padding: nothing is written for it, and what is attended for it does not matter.
    """

    name: str
    supports_graphs: bool

    def prepare(self) -> bool:
        """Spend some milliseconds of idle time on what steps would have to wait for; returns whether there is more."""

    def begin(self, batch: Batch) -> AttentionStep:
        """Do the block copies that the batch asks for, and prepare the metadata that all layers share."""
