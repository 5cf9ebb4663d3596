"""Inputs that a token has for each layer, beside the hidden states, and the blocks that add them (Gemma 3n and 4).

They are embedded beside the hidden states. The first block takes the two apart and leaves the inputs for the others.
Each description builds the block above it.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from typing_extensions import override

from weft.engine.describe.config import ModelConfig
from weft.engine.describe.cut import Cut
from weft.engine.describe.specs import BlockSpec, DecoderSpec, NormSpec, OutputSpec, PartSpec
from weft.engine.describe.tensor_names import extended_spec, norm_spec, output_spec
from weft.engine.families.gemma import Gemma4Layers
from weft.engine.layers.block import Block, BlockStep, Layer, Linear
from weft.engine.layers.feed_forward import ungated
from weft.engine.layers.kernels import LayerKernels
from weft.engine.weights.reader import TensorRef, WeightReader, WeightRef

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
class LayerInputsSpec(BlockSpec):
    """`LayerInputs`."""

    projection: WeightRef
    norm: NormSpec
    size: int

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Block:
        projection = kernels.linear(self.projection, reader)
        return LayerInputs(projection, self.norm.build_by_torch(reader), self.projection.in_features, self.size)


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


@dataclass(frozen=True, slots=True)
class LayeredSpec(BlockSpec):
    """`LayeredBlock`."""

    block: BlockSpec
    gate: WeightRef | None
    activation: str
    projection: OutputSpec | None
    scale: TensorRef
    index: int

    @property
    @override
    def halves(self) -> dict[str, PartSpec]:
        return self.block.halves

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Block:
        block = self.block.build(kernels, reader, first_cache)
        gate = ungated(kernels.linear(self.gate, reader), self.activation) if self.gate else None
        projection = self.projection.build(kernels, reader) if self.projection else None
        return LayeredBlock(block, gate, projection, reader.tensor(self.scale), self.index)

    @override
    def cut(self, cut: Cut) -> Self:
        return replace(self, block=self.block.cut(cut))


@extended_spec.register
def layered_decoder_spec(switches: Gemma4Layers, config: ModelConfig, spec: DecoderSpec) -> DecoderSpec:
    """The decoder with inputs and scales of its layers."""
    size, hidden, num_layers = switches.input_size, config.hidden_size, config.num_layers
    blocks = tuple(_layered(switches, config, block, index) for index, block in enumerate(spec.blocks))
    if not size:
        return replace(spec, blocks=blocks)
    projection = WeightRef(("model.per_layer_model_projection",), (num_layers * size,), hidden, scales=(hidden**-0.5,))
    norm = NormSpec(TensorRef("model.per_layer_projection_norm.weight", (size,)), config.rms_norm_eps)
    names = ("model.embed_tokens_per_layer",)
    embedding = WeightRef(names, (switches.vocab_size,), num_layers * size, scales=(size**0.5,))
    return replace(spec, blocks=(LayerInputsSpec(projection, norm, size), *blocks), layer_embedding=embedding)


def _layered(switches: Gemma4Layers, config: ModelConfig, block: BlockSpec, index: int) -> LayeredSpec:
    layer, size, hidden = f"{config.switches.names.layers}.{index}", switches.input_size, config.hidden_size
    gate = WeightRef((f"{layer}.per_layer_input_gate",), (size,), hidden)
    matrix = WeightRef((f"{layer}.per_layer_projection",), (hidden,), size)
    projection = output_spec(config, matrix, norm_spec(config, f"{layer}.post_per_layer_input_norm"))
    scale = TensorRef(f"{layer}.layer_scalar", (1,))
    return LayeredSpec(block, gate if size else None, config.activation, projection if size else None, scale, index)
