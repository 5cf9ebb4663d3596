"""The protocols of paged attention: what a model asks of a backend in each step.

A backend alone owns the layout of its KV cache, and writes and copies it. The model hands it queries, keys and values
of one layer and gets the attention output. Block tables and slots reach the backend through `begin`, once per step.
`weft.engine.cache.specs` says what a layer keeps and how layers form groups.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from weft.engine.step.batch import Batch


class PagedCache(NamedTuple):
    """Where a layer writes the K/V that it prepares.

    Attributes:
        blocks: (num_blocks, 2, num_kv_heads, block_size, head_dim), with 2 for keys and values, or 1 for latents.
        slots: (num_tokens,) int32, block * block_size + offset in the block; -1 writes nothing.
        scales: (2, num_kv_heads) float32, by which K and V are divided before they are rounded to fp8; else not read.
    """

    blocks: torch.Tensor
    slots: torch.Tensor
    scales: torch.Tensor


class AttentionStep(Protocol):
    """Attention for the batch of one step. `AttentionBackend.begin` makes it; each layer uses it once."""

    def cache(self, layer: int) -> PagedCache | None:
        """Where the model writes K/V of a layer before it calls `attend`; None if `attend` writes them."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend causally, each token within its request; first write keys and values unless `cache` returns a place.

        Args:
            layer: Index of the layer.
            queries: (num_tokens, num_heads, head_dim), rotary embedding applied.
            keys: (num_tokens, num_kv_heads, head_dim), rotary embedding applied.
            values: (num_tokens, num_kv_heads, value_dim); of latents these are the first values of the keys.
            sinks: (num_heads,) float32, of a layer whose spec says `has_sinks`; None for any other.

        Returns:
            (num_tokens, num_heads, value_dim), valid until the next call, which may reuse the memory.
        """


class AttentionBackend(Protocol):
    """Owns the KV cache tensors of all layers. Constructed with groups, number of blocks, block size, dtype, device.

    Attributes:
        supports_graphs: Whether steps may be captured and replayed (`run.cuda_graphs`). Four things hold then. `begin`
            writes the batch to device memory that never moves, and does not wait for the device. If `Batch.graph` names
            a recorded step, `attend` takes its padding, too, and what it launches depends only on that name. Padding
            reads no keys, writes none, and gets zeros, so that no value of it is infinite or not a number. A batch
            without requests is all padding.
    """

    name: str
    supports_graphs: bool

    def prepare(self) -> bool:
        """Spend a few milliseconds of idle time on work that steps would wait for; returns whether more is left."""

    def blocks(self, layer: int) -> Sequence[torch.Tensor]:
        """The tensors that hold the blocks of a layer, each (num_blocks, ...) and contiguous."""

    def begin(self, batch: Batch) -> AttentionStep:
        """Do the block copies of the batch, and prepare the metadata that all layers share."""
