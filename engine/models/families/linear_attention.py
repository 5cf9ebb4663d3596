"""Switches of layers that are no plain attention: gated delta rule, short convolution, gated attention."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from typing_extensions import override

from weft.engine.fields import Fields
from weft.engine.models.families.family import FeedForwardSwitches, MixerSwitches

if TYPE_CHECKING:
    from weft.engine.describe.specs import FeedForwardSpec, MixerSpec, NormSpec
    from weft.engine.models.config import ModelConfig


def read_layer_types(fields: Fields, default: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """The kind of every layer, one of those known."""
    layer_types = fields.texts("layer_types") or default
    num_layers = fields.integer("num_hidden_layers")
    if len(layer_types) != num_layers or not set(layer_types) <= set(known):
        raise fields.wrong("layer_types", f"a list of {num_layers} of {', '.join(known)}")
    return layer_types


@dataclass(frozen=True, slots=True)
class DeltaSwitches(MixerSwitches):
    """Linear attention by the gated delta rule; see `weft.engine.layers.gated_delta`.

    Attributes:
        kernel: Tokens that the convolution sees.
        prefix: Of the tensors' names, behind the name of the layer.
        projections: Names of the matrices of queries, keys and values, gate, rates, decays; the first three together or
            each by itself.
        is_grouped: There are two matrices instead, of queries to gate and of the others, stacked by key heads.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    prefix: str = "linear_attn"
    projections: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    is_grouped: bool = False
    norm: str = "norm"
    output: str = "out_proj"

    @override
    def spec(self, config: "ModelConfig", layer: str, output_norm: "NormSpec | None") -> "MixerSpec":
        from weft.engine.models.linear_attention import gated_delta_spec

        return gated_delta_spec(self, config, f"{layer}.{self.prefix}", output_norm)


@dataclass(frozen=True, slots=True)
class ShortConvolutionSwitches(MixerSwitches):
    """A convolution between two gates; see `weft.engine.layers.short_convolution`.

    Attributes:
        kernel: Tokens that it sees.
    """

    kernel: int
    has_bias: bool

    @override
    def spec(self, config: "ModelConfig", layer: str, output_norm: "NormSpec | None") -> "MixerSpec":
        from weft.engine.models.linear_attention import short_convolution_spec

        return short_convolution_spec(self, config, f"{layer}.conv", output_norm)


@dataclass(frozen=True, slots=True)
class GatedRecurrenceSwitches(MixerSwitches):
    """The recurrence of Griffin; see `weft.engine.layers.gated_recurrence`.

    Attributes:
        width: Channels.
        kernel: Tokens that the convolution sees.
    """

    width: int
    kernel: int

    @override
    def spec(self, config: "ModelConfig", layer: str, output_norm: "NormSpec | None") -> "MixerSpec":
        from weft.engine.models.linear_attention import gated_recurrence_spec

        return gated_recurrence_spec(self, config, f"{layer}.temporal_block", output_norm)


@dataclass(frozen=True, slots=True)
class GatedAttentionSwitches(MixerSwitches):
    """Softmax attention with gates behind the queries of each head; see `weft.engine.layers.gated_attention`.

    Attributes:
        index: Of the layer.
    """

    index: int

    @override
    def spec(self, config: "ModelConfig", layer: str, output_norm: "NormSpec | None") -> "MixerSpec":
        from weft.engine.models.linear_attention import gated_attention_spec

        return gated_attention_spec(self, config, layer, output_norm)


@dataclass(frozen=True, slots=True)
class SizedFeedForward(FeedForwardSwitches):
    """The dense layer with a size that is computed from config.json."""

    intermediate_size: int

    @override
    def spec(self, config: "ModelConfig", layer: str, output_norm: "NormSpec | None") -> "FeedForwardSpec":
        from weft.engine.describe.tensor_names import dense_spec

        return dense_spec(replace(config, intermediate_size=self.intermediate_size), layer, output_norm)

    @override
    def num_values(self, hidden_size: int) -> int:
        return self.intermediate_size
