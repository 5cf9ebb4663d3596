"""Descriptions of a model before it is loaded: its blocks, the weights they read, the caches they keep.

Memory is planned from a description, and the model is built from it. A new kind of block is a new class here. The
fields of a part declare what it needs: a `WeightRef` or `VectorRef` is read, a `CacheSpec` is kept, and the fields of
nested parts count as its own.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.cache.specs import CacheSpec, PagedKV
from weft.engine.layers.block import Attention, Block, FeedForward, GatedFeedForward, Mixer, PreNormBlock
from weft.engine.layers.chained import ChainedLinear
from weft.engine.layers.kit import LayerKit
from weft.engine.layers.norm import HeadNorm
from weft.engine.layers.parts import Layer, Linear
from weft.engine.weights.formats import WeightReader
from weft.engine.weights.refs import VectorRef, WeightRef


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part that is still to be built."""

    @property
    def weights(self) -> tuple[WeightRef | VectorRef, ...]:
        """Everything it reads, in the order of its fields."""
        return tuple(value for value in _values(self) if isinstance(value, WeightRef | VectorRef))

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """What it keeps of a request, each in a cache of its own; empty for a part without memory."""
        return tuple(value for value in _values(self) if isinstance(value, CacheSpec))


def _values(value: object) -> Iterator[object]:
    """The values in the fields of a part, with nested parts and tuples taken apart."""
    if isinstance(value, tuple):
        for item in value:
            yield from _values(item)
    elif isinstance(value, PartSpec):
        yield from _values(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))
    else:
        yield value


class BlockSpec(PartSpec, ABC):
    """A block that is still to be built."""

    @abstractmethod
    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Block:
        """Load it; its caches get the indices from first_cache on."""


class MixerSpec(PartSpec, ABC):
    """A mixer that is still to be built."""

    @abstractmethod
    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Mixer:
        """Load it; its caches get the indices from first_cache on."""


class FeedForwardSpec(PartSpec, ABC):
    """A feed-forward layer that is still to be built."""

    @abstractmethod
    def build(self, kit: LayerKit, reader: WeightReader) -> FeedForward:
        """Load it."""


@dataclass(frozen=True, slots=True)
class NormSpec(PartSpec):
    """RMSNorm with these weights."""

    weight: VectorRef
    eps: float

    def build(self, kit: LayerKit, reader: WeightReader) -> Layer:
        """Load it."""
        return kit.norm(reader.vector(self.weight), self.eps)


@dataclass(frozen=True, slots=True)
class OutputSpec(PartSpec):
    """The matrix that leads from a half of a block back to the hidden states, and the norm after it, if any."""

    matrix: WeightRef
    norm: NormSpec | None = None

    def build(self, kit: LayerKit, reader: WeightReader) -> Linear:
        """Load it."""
        linear = kit.linear(self.matrix, reader)
        return linear if self.norm is None else ChainedLinear(linear, self.norm.build(kit, reader))


@dataclass(frozen=True, slots=True)
class AttentionSpec(MixerSpec):
    """`weft.engine.layers.block.Attention`; head_norms are those of queries and keys, None without QK-norm."""

    qkv: WeightRef
    head_norms: tuple[NormSpec, NormSpec] | None
    output: OutputSpec
    num_heads: int
    cache: PagedKV

    @override
    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Mixer:
        num_kv_heads, norm = self.cache.num_kv_heads, None
        if self.head_norms is not None:
            queries, keys = self.head_norms
            weights = reader.vector(queries.weight), reader.vector(keys.weight)
            norm = HeadNorm(*weights, self.num_heads, num_kv_heads, queries.eps)
        qkv = kit.linear(self.qkv, reader)
        heads = kit.heads(norm, self.num_heads, num_kv_heads)
        return Attention(qkv, heads, self.output.build(kit, reader), self.cache.head_dim, first_cache)


@dataclass(frozen=True, slots=True)
class GatedSpec(FeedForwardSpec):
    """`GatedFeedForward`; gate_up stacks both projections, gate first."""

    gate_up: WeightRef
    activation: str
    output: OutputSpec

    @override
    def build(self, kit: LayerKit, reader: WeightReader) -> FeedForward:
        gated = kit.gated(self.gate_up, reader, self.activation)
        return GatedFeedForward(gated, self.output.build(kit, reader))


@dataclass(frozen=True, slots=True)
class PreNormSpec(BlockSpec):
    """`PreNormBlock`."""

    mixer_norm: NormSpec
    mixer: MixerSpec
    feed_forward_norm: NormSpec
    feed_forward: FeedForwardSpec

    @override
    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Block:
        return PreNormBlock(
            self.mixer_norm.build(kit, reader),
            self.mixer.build(kit, reader, first_cache),
            self.feed_forward_norm.build(kit, reader),
            self.feed_forward.build(kit, reader),
        )


@dataclass(frozen=True, slots=True)
class DecoderSpec(PartSpec):
    """A whole decoder; head is None if the output head shares the matrix of the embedding."""

    embedding: WeightRef
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    head: WeightRef | None

    @property
    def matrices(self) -> tuple[WeightRef, ...]:
        """Every matrix that inputs are multiplied with, in order."""
        inner = (weight for block in self.blocks for weight in block.weights if isinstance(weight, WeightRef))
        return (*inner, self.head or self.embedding)

    @property
    def vectors(self) -> tuple[VectorRef, ...]:
        """The weights of all norms."""
        return tuple(weight for weight in self.weights if isinstance(weight, VectorRef))

    @property
    def num_parameters(self) -> int:
        """Values in the checkpoint; a shared matrix counts once."""
        return sum(weight.num_values for weight in self.weights)

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
