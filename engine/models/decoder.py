"""The one decoder: embedding, blocks, final norm, output head.

Nothing here knows the cache: blocks get the `StepCaches` that the caller passes in. All tensors are flat over the
tokens of a step. The caller runs everything under `torch.inference_mode`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.engine.cache.specs import CacheSpec
from weft.engine.kernels.caches import StepCaches
from weft.engine.layers.block import Block, BlockStep, run_blocks
from weft.engine.layers.parts import Layer, Linear
from weft.engine.layers.rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model ready to run on one device. Made by `weft.engine.models.loading`.

    Attributes:
        blocks: With the layers that a kit has fused as one block.
        cache_specs: What each cache keeps.
        weights_bytes: What the weights take in memory.
    """

    embedding: Layer
    blocks: Sequence[Block]
    norm: Layer
    head: Linear
    rotary: RotaryTable
    cache_specs: tuple[CacheSpec, ...]
    weights_bytes: int

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: StepCaches,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the tokens of one step through all blocks.

        Args:
            token_ids: (num_tokens,) int64.
            positions: (num_tokens,) int64, position of each token in its request.
            caches: Those of this step.
            rows: (num_rows,) indices of the tokens whose hidden states are wanted; None for all.

        Returns:
            (num_rows, hidden_size) hidden states after the final norm, in the model's dtype.
        """
        step = BlockStep(self.rotary.gather(positions), caches.attention, rows, caches.states)
        hidden = run_blocks(self.blocks, self.embedding(token_ids), step)
        return self.norm(hidden) if hidden.size(0) else hidden  # an empty launch is an error on CUDA

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) hidden states of `forward` -> (num_rows, vocab_size) float32, until the next call."""
        return self.head.to_float32(hidden)
