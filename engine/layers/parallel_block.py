"""A block whose halves stand side by side."""

from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.layers.block import Block, BlockStep, FeedForward, Mixer
from weft.engine.layers.parts import Layer


@dataclass(frozen=True, slots=True)
class ParallelBlock(Block):
    """A block whose halves read the same hidden states (Wang and Komatsuzaki, 2021).

    Attributes:
        feed_forward_norm: None if the feed-forward layer shares the norm of the mixer.
    """

    mixer_norm: Layer
    mixer: Mixer
    feed_forward_norm: Layer | None
    feed_forward: FeedForward

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        normed = self.mixer_norm(hidden)
        mixed = self.mixer.mix(normed, step)
        if step.rows is not None:
            hidden, normed, mixed = hidden[step.rows], normed[step.rows], mixed[step.rows]
            if not len(step.rows):  # an empty launch is an error on CUDA
                return hidden
        inputs = self.feed_forward_norm(hidden) if self.feed_forward_norm else normed
        self.mixer.add_to(hidden, mixed)
        self.feed_forward.add_to(hidden, inputs)
        return hidden
