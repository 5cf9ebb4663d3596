"""Dense feed-forward layers: the plain one, and those whose size or factors a family computes."""

from dataclasses import replace

from weft.engine.describe.config import ModelConfig
from weft.engine.describe.specs import DenseSpec, NormSpec
from weft.engine.describe.tensor_names import feed_forward_spec, output_spec
from weft.engine.families.hybrids import ScaledDense
from weft.engine.families.switches import SizedFeedForward
from weft.engine.weights.reader import WeightRef


def dense_spec(config: ModelConfig, layer: str, post_norm: NormSpec | None) -> DenseSpec:
    """The dense feed-forward layer of the layer of this name."""
    inner, hidden, switches = config.intermediate_size, config.hidden_size, config.switches
    has_bias, is_transposed = switches.mlp_bias, switches.is_transposed
    names = tuple(f"{layer}.{name}" for name in switches.names.gate_up)
    sizes = (inner, inner) if switches.is_gated else (inner,)
    first = WeightRef(names, sizes, hidden, has_bias, is_transposed=is_transposed)
    down = WeightRef((f"{layer}.{switches.names.down}",), (hidden,), inner, has_bias, is_transposed=is_transposed)
    return DenseSpec(first, config.activation, output_spec(config, down, post_norm))


@feed_forward_spec.register
def sized_spec(switches: SizedFeedForward, config: ModelConfig, layer: str, output_norm: NormSpec | None) -> DenseSpec:
    """The dense layer of this size."""
    return dense_spec(replace(config, intermediate_size=switches.intermediate_size), layer, output_norm)


@feed_forward_spec.register
def scaled_spec(switches: ScaledDense, config: ModelConfig, layer: str, output_norm: NormSpec | None) -> DenseSpec:
    """The dense layer with factors in its matrices."""
    sized = replace(config, intermediate_size=switches.size or config.intermediate_size)
    dense = dense_spec(sized, layer, output_norm)
    matrix = replace(dense.output.matrix, scales=(switches.output_scale,))
    first = replace(dense.first, scales=(switches.gate_scale, 1.0))
    return replace(dense, first=first, output=replace(dense.output, matrix=matrix))
