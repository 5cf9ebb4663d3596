"""The descriptions of inputs for each layer, and of the blocks that add them, and how they are built."""

from dataclasses import dataclass, replace

from typing_extensions import override

from weft.engine.describe.specs import BlockSpec, DecoderSpec, NormSpec, OutputSpec
from weft.engine.describe.tensor_names import norm_spec, output_spec
from weft.engine.layers.block import Block
from weft.engine.layers.gated import ungated
from weft.engine.layers.kit import LayerKit
from weft.engine.layers.layer_inputs import LayeredBlock, LayerInputs
from weft.engine.models.config import ModelConfig
from weft.engine.models.families.gemma4 import Gemma4Layers
from weft.engine.weights.formats import WeightReader
from weft.engine.weights.refs import TensorRef, WeightRef


@dataclass(frozen=True, slots=True)
class LayerInputsSpec(BlockSpec):
    """`LayerInputs`."""

    projection: WeightRef
    norm: NormSpec
    size: int

    @override
    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Block:
        projection = kit.linear(self.projection, reader)
        return LayerInputs(projection, self.norm.build_by_torch(reader), self.projection.in_features, self.size)


@dataclass(frozen=True, slots=True)
class LayeredSpec(BlockSpec):
    """`LayeredBlock`."""

    block: BlockSpec
    gate: WeightRef | None
    activation: str
    projection: OutputSpec | None
    scale: TensorRef
    index: int

    @override
    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Block:
        block = self.block.build(kit, reader, first_cache)
        gate = ungated(kit.linear(self.gate, reader), self.activation) if self.gate else None
        projection = self.projection.build(kit, reader) if self.projection else None
        return LayeredBlock(block, gate, projection, reader.tensor(self.scale), self.index)


def layered_decoder_spec(switches: Gemma4Layers, config: ModelConfig, spec: DecoderSpec) -> DecoderSpec:
    """The decoder with inputs and scales of its layers."""
    size, hidden, num_layers = switches.input_size, config.hidden_size, config.num_layers
    blocks = tuple(_layered(switches, config, block, index) for index, block in enumerate(spec.blocks))
    if not size:
        return replace(spec, blocks=blocks)
    projection = WeightRef(("model.per_layer_model_projection",), (num_layers * size,), hidden, scales=(hidden**-0.5,))
    norm = NormSpec(TensorRef("model.per_layer_projection_norm.weight", (size,)), config.rms_norm_eps)
    embedding = WeightRef(
        ("model.embed_tokens_per_layer",), (switches.vocab_size,), num_layers * size, scales=(size**0.5,)
    )
    return replace(spec, blocks=(LayerInputsSpec(projection, norm, size), *blocks), layer_embedding=embedding)


def _layered(switches: Gemma4Layers, config: ModelConfig, block: BlockSpec, index: int) -> LayeredSpec:
    layer, size, hidden = f"{config.switches.names.layers}.{index}", switches.input_size, config.hidden_size
    gate = WeightRef((f"{layer}.per_layer_input_gate",), (size,), hidden)
    matrix = WeightRef((f"{layer}.per_layer_projection",), (hidden,), size)
    projection = output_spec(config, matrix, norm_spec(config, f"{layer}.post_per_layer_input_norm"))
    scale = TensorRef(f"{layer}.layer_scalar", (1,))
    return LayeredSpec(block, gate if size else None, config.activation, projection if size else None, scale, index)
