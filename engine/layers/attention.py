"""The seam between the model and paged attention.

A backend alone owns shape, write and copy of its KV cache. The model hands it queries, keys and values of one layer
and gets the attention output back; block tables and slots reach the backend through `begin`, once per step, never
through a global. What a layer keeps, and how layers form groups: `weft.engine.cache.specs`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from weft.engine.step.batch import Batch


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
        supports_graphs: Whether steps of one token a request may be recorded and replayed (`run.cuda_graphs`).
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
