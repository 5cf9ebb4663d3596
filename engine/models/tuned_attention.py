"""The description of attention whose scores grow with the query's position, and how it is built."""

from dataclasses import dataclass, replace

from typing_extensions import override

from weft.engine.describe.specs import AttentionSpec, MixerSpec, NormSpec
from weft.engine.describe.tensor_names import attention_spec
from weft.engine.layers.block import Attention, Mixer
from weft.engine.layers.kit import LayerKit
from weft.engine.layers.tuned_attention import TunedAttention
from weft.engine.models.config import ModelConfig
from weft.engine.models.families.tuned_attention import AttentionSwitches
from weft.engine.weights.formats import WeightReader


@dataclass(frozen=True, slots=True)
class TunedAttentionSpec(MixerSpec):
    """`TunedAttention`."""

    attention: AttentionSpec
    table: int

    @override
    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Mixer:
        attention = self.attention.build(kit, reader, first_cache)
        assert isinstance(attention, Attention)
        return TunedAttention(attention, self.attention.num_heads * attention.head_dim, self.table)


def tuned_attention_spec(
    switches: AttentionSwitches, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> MixerSpec:
    """Attention of the layer of this name; the table of temperatures stands behind the rotary embeddings."""
    attention = attention_spec(config, layer, switches.index, output_norm)
    cache = replace(attention.cache, span=switches.span)
    norms = attention.head_norms if switches.has_head_norms else None
    attention = replace(attention, cache=cache, head_norms=norms)
    return TunedAttentionSpec(attention, len(config.distinct_ropes)) if switches.is_tuned else attention
