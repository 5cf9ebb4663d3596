"""The descriptions of attention that shares keys and values, and how they are built."""

from dataclasses import dataclass, replace

from typing_extensions import override

from weft.engine.describe.specs import AttentionSpec, MixerSpec, NormSpec, OutputSpec
from weft.engine.describe.tensor_names import attention_spec
from weft.engine.layers.block import Attention, Mixer
from weft.engine.layers.kit import LayerKit
from weft.engine.layers.shared_attention import NormedValues, ReadingAttention, SharingAttention
from weft.engine.models.config import ModelConfig
from weft.engine.models.families.gemma4 import Gemma4Attention
from weft.engine.weights.formats import WeightReader
from weft.engine.weights.refs import WeightRef


@dataclass(frozen=True, slots=True)
class SharingSpec(MixerSpec):
    """Attention with `NormedValues`; is_read if it is `SharingAttention`."""

    attention: AttentionSpec
    eps: float
    is_read: bool

    @override
    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Mixer:
        attention = self.attention.build(kit, reader, first_cache)
        assert isinstance(attention, Attention)
        heads = NormedValues(attention.heads, self.attention.cache.num_kv_heads, self.eps)
        attention = replace(attention, heads=heads)
        return SharingAttention(attention) if self.is_read else attention


@dataclass(frozen=True, slots=True)
class ReadingSpec(MixerSpec):
    """`ReadingAttention`."""

    queries: WeightRef
    norm: NormSpec
    output: OutputSpec
    head_dim: int
    source: int
    rotation: int

    @override
    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Mixer:
        queries, norm = kit.linear(self.queries, reader), self.norm.build_by_torch(reader)
        return ReadingAttention(
            queries, norm, self.output.build(kit, reader), self.head_dim, self.source, self.rotation
        )


def gemma4_attention_spec(
    switches: Gemma4Attention, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> MixerSpec:
    """Attention of the layer of this name; without a matrix of values it reads that of keys in its place."""
    names = config.switches.names
    if switches.has_keys_as_values:
        names = replace(names, qkv=(*names.qkv[:2], names.qkv[1]))
    sized = replace(
        config,
        head_dim=switches.head_dim,
        num_kv_heads=switches.num_kv_heads,
        switches=replace(config.switches, names=names),
    )
    attention = attention_spec(sized, layer, switches.index, output_norm)
    if switches.source is None:
        return SharingSpec(attention, config.rms_norm_eps, switches.is_read)
    assert attention.head_norms is not None
    return ReadingSpec(
        replace(attention.qkv, names=attention.qkv.names[:1], sizes=attention.qkv.sizes[:1]),
        attention.head_norms.queries,
        attention.output,
        switches.head_dim,
        switches.source,
        attention.rotation,
    )
