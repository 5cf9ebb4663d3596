"""The one decoder: embedding, blocks, final norm, output head.

It owns no cache: the caller passes the `StepCaches` of each step. All tensors are flat over the tokens of a step. The
caller runs everything under `torch.inference_mode`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from typing_extensions import override

from weft.engine.cache.specs import CacheSpec
from weft.engine.layers.block import Block, BlockStep, run_blocks, unchanged
from weft.engine.layers.parts import Layer, Linear
from weft.engine.layers.rotary import PositionTable
from weft.engine.layers.step_caches import StepCaches


class Model(Protocol):
    """What the runner needs of a model. No method waits for the device."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, caches: StepCaches, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the tokens of one step through all blocks.

        Args:
            token_ids: (num_tokens,) int64.
            positions: (num_tokens,) int64, position of each token in its request.
            caches: The caches of this step.
            rows: (num_rows,) indices of the tokens whose hidden states are wanted; None for all.

        Returns:
            (num_rows, hidden_size) hidden states after the final norm, in the model's dtype.
        """

    def typed(self, positions: torch.Tensor, token_types: torch.Tensor) -> torch.Tensor:
        """Positions for `forward` that say the types of tokens, too; a model that knows no types ignores them."""
        return positions

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(num_rows, vocab_size) float32 logits of (num_rows, hidden_size). The next call may overwrite them."""


@dataclass(frozen=True, slots=True)
class Decoder(Model):
    """A model ready to run on one device. Made by `weft.engine.models.loading`.

    Attributes:
        head: None in a later pipeline stage.
        blocks: A kit may have fused several layers into one block.
        norm: Behind the last block.
        rotaries: Every rotary embedding of the model, and what else depends on positions; blocks name them by index.
        cache_specs: What each cache keeps.
        weights_bytes: Memory that the weights take.
        positions: A learned embedding of positions; None for none.
        embedding_norm: Of the sum of embeddings.
        num_types: Types that tokens may have. The embedding of positions has num_positions rows for each of them.
    """

    embedding: Layer
    blocks: Sequence[Block]
    norm: Layer
    head: Linear | None
    rotaries: tuple[PositionTable, ...]
    cache_specs: tuple[CacheSpec, ...]
    weights_bytes: int
    positions: Layer | None = None
    embedding_norm: Layer = unchanged
    num_types: int = 1
    num_positions: int = 0

    @override
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, caches: StepCaches, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        step = BlockStep(tuple(rotary.gather(positions) for rotary in self.rotaries), caches, rows)
        hidden = self.embedding(token_ids)
        if self.positions is not None:
            hidden = hidden + self.positions(positions)
        hidden = run_blocks(self.blocks, self.embedding_norm(hidden), step)
        return self.norm(hidden) if hidden.size(0) else hidden  # an empty launch is an error on CUDA

    @override
    def typed(self, positions: torch.Tensor, token_types: torch.Tensor) -> torch.Tensor:
        return positions + token_types.clamp(max=self.num_types - 1) * self.num_positions

    @override
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert self.head is not None  # a later stage computes no logits
        return self.head.to_float32(hidden_states)
