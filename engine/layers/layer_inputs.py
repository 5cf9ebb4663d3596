"""Inputs that a token has for each layer, beside the hidden states, and blocks that add them (Gemma 3n and 4).

They are embedded beside the hidden states. The first block takes the two apart and leaves the inputs for the others.
"""

from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.layers.block import Block, BlockStep
from weft.engine.layers.parts import Layer, Linear

_NAME = "layer inputs"


def beside(first: Layer, second: Layer) -> Layer:
    """Two embeddings of the same tokens, one behind the other."""
    return lambda token_ids: torch.cat((first(token_ids), second(token_ids)), dim=-1)


@dataclass(frozen=True, slots=True)
class LayerInputs(Block):
    """Adds to the embedded inputs of all layers what a matrix makes of the hidden states, and leaves them.

    Attributes:
        projection: (num_layers * size, hidden_size).
        norm: Over the inputs of each layer.
    """

    projection: Linear
    norm: Layer
    hidden_size: int
    size: int

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        hidden, embedded = hidden.tensor_split((self.hidden_size,), dim=1)
        hidden = hidden.contiguous()
        if len(hidden):  # an empty launch is an error on CUDA
            projected = self.norm(self.projection(hidden).view(len(hidden), -1, self.size))
            step.caches.passed[_NAME] = ((projected + embedded.view_as(projected)).mul_(2**-0.5),)
        return hidden


@dataclass(frozen=True, slots=True)
class LayeredBlock(Block):
    """A block that then adds its layer's inputs and scales the hidden states.

    Attributes:
        gate: (size, hidden_size) and an activation; None for a model without inputs of layers.
        projection: (hidden_size, size), of the inputs times the gate.
        scale: (1,), on all hidden states.
    """

    block: Block
    gate: Layer | None
    projection: Linear | None
    scale: torch.Tensor
    index: int

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        hidden = self.block.forward(hidden, step)
        if self.gate and self.projection and len(hidden):
            inputs = step.caches.passed[_NAME][0][:, self.index]
            inputs = inputs if step.rows is None else inputs[step.rows]
            self.projection.add_to(hidden, self.gate(hidden).mul_(inputs))
        return hidden.mul_(self.scale)
