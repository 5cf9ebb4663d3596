"""What a model is made of, before anything is loaded: blocks that name the weights they read and what they cache.

Memory is planned from a spec, and the model is built from it. A new kind of block is a new spec.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.engine.cache.specs import CacheSpec, PagedKV
from weft.engine.layers.block import Attention, Block, FeedForward, GatedFeedForward, Mixer, PreNormBlock
from weft.engine.layers.chained import ChainedLinear
from weft.engine.layers.kit import LayerKit
from weft.engine.layers.norm import HeadNorm
from weft.engine.layers.parts import Layer, Linear
from weft.engine.weights.reader import WeightReader
from weft.engine.weights.refs import VectorRef, WeightRef

Weights = tuple[WeightRef | VectorRef, ...]


class BlockSpec(Protocol):
    """A block that is still to be built."""

    @property
    def weights(self) -> Weights:
        """All that it reads."""

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """What it keeps of a request, each in a cache of its own; empty for a block without memory."""

    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Block:
        """Load it; its caches have the indices from first_cache on."""


class MixerSpec(Protocol):
    """See `BlockSpec`."""

    @property
    def weights(self) -> Weights:
        """All that it reads."""

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """What it keeps of a request."""

    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Mixer:
        """Load it."""


class FeedForwardSpec(Protocol):
    """See `BlockSpec`."""

    @property
    def weights(self) -> Weights:
        """All that it reads."""

    def build(self, kit: LayerKit, reader: WeightReader) -> FeedForward:
        """Load it."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMSNorm with these weights."""

    weight: VectorRef
    eps: float

    def build(self, kit: LayerKit, reader: WeightReader) -> Layer:
        """Load it."""
        return kit.norm(reader.vector(self.weight), self.eps)


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The matrix with which a half of a block returns to the hidden states, and the norm behind it, if there is one."""

    matrix: WeightRef
    norm: NormSpec | None = None

    @property
    def weights(self) -> Weights:
        """See `BlockSpec`."""
        return (self.matrix,) if self.norm is None else (self.matrix, self.norm.weight)

    def build(self, kit: LayerKit, reader: WeightReader) -> Linear:
        """Load it."""
        linear = kit.linear(self.matrix, reader)
        return linear if self.norm is None else ChainedLinear(linear, self.norm.build(kit, reader))


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """`weft.engine.layers.block.Attention`; head_norms are those of queries and keys, or there are none."""

    qkv: WeightRef
    head_norms: tuple[NormSpec, NormSpec] | None
    output: OutputSpec
    num_heads: int
    cache: PagedKV

    @property
    def weights(self) -> Weights:
        """See `BlockSpec`."""
        return (self.qkv, *(norm.weight for norm in self.head_norms or ()), *self.output.weights)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """See `BlockSpec`."""
        return (self.cache,)

    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Mixer:
        """See `BlockSpec`."""
        num_kv_heads, norm = self.cache.num_kv_heads, None
        if self.head_norms is not None:
            queries, keys = self.head_norms
            weights = reader.vector(queries.weight), reader.vector(keys.weight)
            norm = HeadNorm(*weights, self.num_heads, num_kv_heads, queries.eps)
        qkv = kit.linear(self.qkv, reader)
        heads = kit.heads(norm, self.num_heads, num_kv_heads)
        return Attention(qkv, heads, self.output.build(kit, reader), self.cache.head_dim, first_cache)


@dataclass(frozen=True, slots=True)
class GatedSpec:
    """`GatedFeedForward`; gate_up stacks both projections, gate first."""

    gate_up: WeightRef
    activation: str
    output: OutputSpec

    @property
    def weights(self) -> Weights:
        """See `BlockSpec`."""
        return (self.gate_up, *self.output.weights)

    def build(self, kit: LayerKit, reader: WeightReader) -> FeedForward:
        """See `BlockSpec`."""
        gated = kit.gated(self.gate_up, reader, self.activation)
        return GatedFeedForward(gated, self.output.build(kit, reader))


@dataclass(frozen=True, slots=True)
class PreNormSpec:
    """`PreNormBlock`."""

    mixer_norm: NormSpec
    mixer: MixerSpec
    feed_forward_norm: NormSpec
    feed_forward: FeedForwardSpec

    @property
    def weights(self) -> Weights:
        """See `BlockSpec`."""
        norms = self.mixer_norm.weight, self.feed_forward_norm.weight
        return (*norms, *self.mixer.weights, *self.feed_forward.weights)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """See `BlockSpec`."""
        return self.mixer.caches

    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Block:
        """See `BlockSpec`."""
        return PreNormBlock(
            self.mixer_norm.build(kit, reader),
            self.mixer.build(kit, reader, first_cache),
            self.feed_forward_norm.build(kit, reader),
            self.feed_forward.build(kit, reader),
        )


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder; head None means that the output head is the embedding."""

    embedding: WeightRef
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    head: WeightRef | None

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """Of all blocks, in order."""
        return tuple(cache for block in self.blocks for cache in block.caches)

    @property
    def matrices(self) -> tuple[WeightRef, ...]:
        """Every matrix that inputs are multiplied with, in order."""
        inner = (weight for block in self.blocks for weight in block.weights if isinstance(weight, WeightRef))
        return (*inner, self.head or self.embedding)

    @property
    def vectors(self) -> tuple[VectorRef, ...]:
        """The weights of all norms."""
        inner = (weight for block in self.blocks for weight in block.weights if isinstance(weight, VectorRef))
        return (*inner, self.norm.weight)

    @property
    def num_parameters(self) -> int:
        """Values in the checkpoint; an output head that is tied to the embedding counts once."""
        embedding = self.embedding.num_values if self.head else 0
        return sum(self._sizes()) + embedding

    def file_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the checkpoint's tensors in dtype."""
        return self.num_parameters * dtype.itemsize

    def weights_bytes(self, kit: LayerKit, dtype: torch.dtype) -> int:
        """Bytes in memory, from the shapes alone."""
        *inner, last = self.matrices
        num_bytes = sum(kit.linear_bytes(matrix, dtype) for matrix in inner)
        num_bytes += sum(vector.num_bytes(dtype) for vector in self.vectors)
        if self.head is None:
            return num_bytes + kit.tied_bytes(last, dtype)
        return num_bytes + kit.linear_bytes(last, dtype) + self.embedding.num_values * dtype.itemsize

    def _sizes(self) -> Iterable[int]:
        yield from (matrix.num_values for matrix in self.matrices)
        yield from (vector.size for vector in self.vectors)
