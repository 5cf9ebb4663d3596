"""Features of pictures that are added behind the first layers (DeepStack: Meng et al., 2024, as in Qwen3-VL).

What sees gives a token of a picture more than the features that stand in the place of its embedding: one more vector
for each of the first layers, from a lower layer of what sees. `Stacked` adds it to the token's hidden states behind
that layer. A step without pictures passes by.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from typing_extensions import override

from weft.engine.describe.specs import BlockSpec
from weft.engine.layers.block import Block, BlockStep, StepCaches
from weft.engine.layers.kernels import LayerKernels
from weft.engine.weights.reader import WeightReader

_STACKED: Final = "features of pictures for layers"


def stack(caches: StepCaches, features: Sequence[tuple[torch.Tensor, torch.Tensor]], hidden_size: int) -> None:
    """Leave features for the blocks of a step.

    Args:
        features: Of each picture, the (n,) indices of its tokens, and (n, num_layers * hidden_size).
    """
    found = [(indices, values) for indices, values in features if values.size(1)]
    if found:
        indices, values = (torch.cat(parts) for parts in zip(*found, strict=True))
        caches.passed[_STACKED] = (indices, values.view(len(values), -1, hidden_size))


@dataclass(frozen=True, slots=True)
class Stacked(Block):
    """Adds the features for the layer before it, in place.

    Attributes:
        index: Which of the vectors of a token.
    """

    index: int

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        if found := step.caches.passed.get(_STACKED):
            indices, values = found  # (n,) and (n, num_layers, hidden_size)
            hidden.index_add_(0, indices, values[:, self.index].to(hidden.dtype))
        return hidden if step.rows is None else hidden[step.rows]


@dataclass(frozen=True, slots=True)
class StackedSpec(BlockSpec):
    """`Stacked`."""

    index: int

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Block:
        return Stacked(self.index)
