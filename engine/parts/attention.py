"""Softmax attention that shares keys and values between layers, or scales queries by their positions.

Sharing: an earlier layer writes keys and values to its cache, and leaves those of the step for the layers that share
them. Scaling: scores grow with the position of the query (scalable softmax: Nakanishi, 2025). Each description builds
the mixer above it.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from typing_extensions import override

from weft.engine.cache.specs import PagedKV
from weft.engine.describe.config import ModelConfig
from weft.engine.describe.cut import Cut
from weft.engine.describe.specs import AttentionSpec, MixerSpec, NormSpec, OutputSpec
from weft.engine.describe.tensor_names import attention_spec, mixer_spec
from weft.engine.families.attention import AttentionSwitches
from weft.engine.families.gemma import Gemma4Attention
from weft.engine.layers.block import Attention, BlockStep, HeadLayer, Layer, Linear, Mixer, PagedCache, ProjectedMixer
from weft.engine.layers.kernels import LayerKernels
from weft.engine.layers.norm import normalise
from weft.engine.layers.rotary import rotate
from weft.engine.weights.reader import WeightReader, WeightRef


@dataclass(frozen=True, slots=True)
class NormedValues:
    """A `HeadLayer` that divides each head of the values by its root mean square, before another one does the rest."""

    heads: HeadLayer
    num_kv_heads: int
    eps: float

    def __call__(
        self, qkv: torch.Tensor, rotation: torch.Tensor, cache: PagedCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `HeadLayer`."""
        values = qkv[:, -self.num_kv_heads :]
        values.copy_(normalise(values, self.eps))
        return self.heads(qkv, rotation, cache)


@dataclass(frozen=True, slots=True)
class SharingAttention(Mixer):
    """Attention that leaves its keys and values for later layers."""

    attention: Attention

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        own, attention = self.attention, step.caches.attention
        qkv = own.qkv(normed).view(len(normed), -1, own.head_dim)
        heads = own.heads(qkv, step.rotations[own.rotation], attention.cache(own.cache))
        step.caches.passed[f"cache {own.cache}"] = heads[1:]
        return attention.attend(own.cache, heads).reshape(len(normed), -1)

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.attention.add_to(residual, mixed)


@dataclass(frozen=True, slots=True)
class SharingSpec(MixerSpec):
    """Attention with `NormedValues`; is_read if it is `SharingAttention`."""

    attention: AttentionSpec
    eps: float
    is_read: bool

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Mixer:
        attention = self.attention.build(kernels, reader, first_cache)
        heads = NormedValues(attention.heads, self.attention.cache.num_kv_heads, self.eps)
        attention = replace(attention, heads=heads)
        return SharingAttention(attention) if self.is_read else attention

    @override
    def cut(self, cut: Cut) -> Self:
        attention = self.attention.cut(cut)
        return self if attention is self.attention else replace(self, attention=attention)


@dataclass(frozen=True, slots=True)
class ReadingAttention(ProjectedMixer):
    """Attention with queries alone, to the keys and values of an earlier layer.

    Attributes:
        queries: (num_heads * head_dim, hidden_size).
        norm: Over each head.
        cache: Of the earlier layer; what the step added to it may be written there again.
        rotation: See `Attention`.
    """

    queries: Linear
    norm: Layer
    output: Linear
    head_dim: int
    cache: int
    rotation: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        queries = self.norm(self.queries(normed).view(len(normed), -1, self.head_dim))
        keys, values = step.caches.passed[f"cache {self.cache}"]
        rotated = rotate(queries, step.rotations[self.rotation])
        return step.caches.attention.attend(self.cache, (rotated, keys, values)).reshape(len(normed), -1)


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
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Mixer:
        queries, norm = kernels.linear(self.queries, reader), self.norm.build_by_torch(reader)
        output = self.output.build(kernels, reader)
        return ReadingAttention(queries, norm, output, self.head_dim, self.source, self.rotation)

    @override
    def cut(self, cut: Cut) -> Self:
        cache, num_heads = cut.caches[self.source], self.queries.out_features // self.head_dim
        if not isinstance(cache, PagedKV) or not cut.divides_heads(num_heads, cache.num_kv_heads):
            return self  # as the attention that it reads from
        queries = cut.by_outputs(self.queries, (self.queries.out_features, num_heads))
        return replace(self, queries=queries, norm=self.norm.of_heads(cut.run(num_heads)), output=self.output.cut(cut))


@mixer_spec.register
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
    queries = replace(attention.qkv, names=attention.qkv.names[:1], sizes=attention.qkv.sizes[:1])
    return ReadingSpec(
        queries, attention.head_norms.queries, attention.output, switches.head_dim, switches.source, attention.rotation
    )


class TemperatureTable:
    """The factor on the queries of every position below max_model_len: 1 + strength * log(1 + periods before it)."""

    def __init__(self, strength: float, period: int, offset: int, max_model_len: int, device: torch.device) -> None:
        """Compute (max_model_len, 1) in float32; offset is added to positions before periods are counted."""
        periods = torch.arange(offset, max_model_len + offset).div(period, rounding_mode="floor")
        self._rows = (1 + strength * torch.log1p(periods.float())).unsqueeze(1).to(device)

    def gather(self, positions: torch.Tensor) -> torch.Tensor:
        """(num_tokens, 1) float32 of positions (num_tokens,)."""
        return self._rows.index_select(0, positions)


@dataclass(frozen=True, slots=True)
class TunedAttention(Mixer):
    """Attention whose queries are multiplied by the factors of their positions, which turning them does not change.

    Attributes:
        query_size: Values of the queries of a token, which come first in what `qkv` makes.
        table: Index of the `TemperatureTable` among the model's tables of positions.
    """

    attention: Attention
    query_size: int
    table: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        qkv = self.attention.qkv(normed)
        qkv[:, : self.query_size] *= step.rotations[self.table]
        return self.attention.attend(qkv, step)

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.attention.add_to(residual, mixed)


@dataclass(frozen=True, slots=True)
class TunedAttentionSpec(MixerSpec):
    """`TunedAttention`."""

    attention: AttentionSpec
    table: int

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Mixer:
        attention = self.attention.build(kernels, reader, first_cache)
        return TunedAttention(attention, self.attention.num_heads * attention.head_dim, self.table)

    @override
    def cut(self, cut: Cut) -> Self:
        attention = self.attention.cut(cut)
        return self if attention is self.attention else replace(self, attention=attention)


@mixer_spec.register
def tuned_attention_spec(
    switches: AttentionSwitches, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> MixerSpec:
    """Attention of the layer of this name; the table of temperatures stands behind the rotary embeddings."""
    attention = attention_spec(config, layer, switches.index, output_norm)
    cache = replace(attention.cache, span=switches.span)
    norms = attention.head_norms if switches.has_head_norms else None
    attention = replace(attention, cache=cache, head_norms=norms)
    return TunedAttentionSpec(attention, len(config.distinct_ropes)) if switches.is_tuned else attention
