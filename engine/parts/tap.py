"""Keeps hidden states from between the blocks of a model, for a head that reads them (EAGLE-3)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.describe.specs import BlockSpec
from weft.engine.layers.block import Block, BlockStep
from weft.engine.layers.kernels import LayerKernels
from weft.engine.weights.reader import WeightReader


@dataclass(frozen=True, slots=True)
class Tap(Block):
    """Changes nothing. It copies what it keeps, since later blocks add to hidden states in place."""

    depth: int

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        step.caches.tapped[self.depth] = hidden.clone()
        return hidden if step.rows is None else hidden[step.rows]


@dataclass(frozen=True, slots=True)
class TapSpec(BlockSpec):
    """`Tap` behind so many layers."""

    depth: int

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Block:
        return Tap(self.depth)


def with_taps(blocks: Sequence[BlockSpec], depths: Sequence[int]) -> Iterator[BlockSpec]:
    """The blocks, with taps behind these numbers of them."""
    for depth, block in enumerate(blocks, 1):
        yield block
        if depth in depths:
            yield TapSpec(depth)
