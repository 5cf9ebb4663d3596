"""A block whose norms come behind the sums, as in BERT."""

from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.layers.block import Block, BlockStep, FeedForward, Mixer
from weft.engine.layers.parts import Layer


@dataclass(frozen=True, slots=True)
class PostNormBlock(Block):
    """A block with a norm behind the sum of each half and its input (Vaswani et al., 2017)."""

    mixer: Mixer
    mixer_norm: Layer
    feed_forward: FeedForward
    feed_forward_norm: Layer

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        mixed = self.mixer.mix(hidden, step)
        if step.rows is not None:
            hidden, mixed = hidden[step.rows], mixed[step.rows]
            if not len(step.rows):  # an empty launch is an error on CUDA
                return hidden
        self.mixer.add_to(hidden, mixed)
        hidden = self.mixer_norm(hidden)
        self.feed_forward.add_to(hidden, hidden)
        return self.feed_forward_norm(hidden)
