"""Descriptions of a model before it is loaded: its blocks, the weights they read, the caches they keep.

Memory is planned from a description, and the model is built from it. A new kind of block is a new class here. The
fields of a part declare what it needs: a `WeightRef` or `TensorRef` is read, a `CacheSpec` is kept, and the fields of
nested parts count as its own.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from typing_extensions import override

from weft.engine.cache.specs import CacheSpec, PagedKV
from weft.engine.describe.cut import Cut, rows
from weft.engine.layers import block as built
from weft.engine.layers import norm as norm_layers
from weft.engine.layers.all_ranks import norm_of_all_ranks, of_all_ranks
from weft.engine.layers.encoder_decoder import distance_buckets
from weft.engine.layers.kernels import LayerKernels
from weft.engine.layers.wrapped_linear import LinearWithEpilogue, clamped, scaled
from weft.engine.weights.reader import ExpertsRef, Run, TensorRef, WeightReader, WeightRef


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part that is still to be built."""

    @property
    def weights(self) -> tuple[WeightRef | ExpertsRef | TensorRef, ...]:
        """Everything it reads, in the order of its fields."""
        return tuple(value for value in _values(self) if isinstance(value, WeightRef | ExpertsRef | TensorRef))

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """What it keeps of a request, each in a cache of its own; empty for a part without memory."""
        return tuple(value for value in _values(self) if isinstance(value, CacheSpec))

    def cut(self, cut: Cut) -> Self:
        """What a rank computes of it; the part itself where it cannot be divided, and is whole on every rank."""
        return self


def _values(value: object) -> Iterator[object]:
    """The values in the fields of a part, then nested parts, and the values of these; tuples are taken apart."""
    if isinstance(value, tuple):
        for item in value:
            yield from _values(item)
    elif isinstance(value, PartSpec):
        yield value
        yield from _values(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))
    else:
        yield value


class BlockSpec(PartSpec, ABC):
    """A block that is still to be built."""

    @property
    def halves(self) -> dict[str, PartSpec]:
        """Its mixer and its feed-forward layer, as far as it has them, by the names of its fields."""
        return {name: part for name in ("mixer", "feed_forward") if (part := getattr(self, name, None))}

    @override
    def cut(self, cut: Cut) -> Self:
        return replace(self, **{name: part.cut(cut) for name, part in self.halves.items()})

    @abstractmethod
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> built.Block:
        """Load it; its caches get the indices from first_cache on."""


class MixerSpec(PartSpec, ABC):
    """A mixer that is still to be built."""

    @abstractmethod
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> built.Mixer:
        """Load it; its caches get the indices from first_cache on."""


class FeedForwardSpec(PartSpec, ABC):
    """A feed-forward layer that is still to be built."""

    @abstractmethod
    def build(self, kernels: LayerKernels, reader: WeightReader) -> built.FeedForward:
        """Load it."""

    def experts_bytes(self, kernels: LayerKernels, dtype: torch.dtype) -> int:
        """Bytes in memory of its experts; those of parts in it count there."""
        return 0


@dataclass(frozen=True, slots=True)
class NormSpec(PartSpec):
    """RMSNorm or LayerNorm.

    Attributes:
        weight, bias: None leaves one out.
        is_layer_norm: Whether the mean is subtracted.
    """

    weight: TensorRef | None
    eps: float
    bias: TensorRef | None = None
    is_layer_norm: bool = False

    def build(self, kernels: LayerKernels, reader: WeightReader) -> built.Layer:
        """Load it; kernels have norms with weights."""
        if self.weight is None:
            return self.build_by_torch(reader)
        weight = reader.tensor(self.weight)
        if self.is_layer_norm:
            return kernels.layer_norm(weight, None if self.bias is None else reader.tensor(self.bias), self.eps)
        return kernels.norm(weight, self.eps)

    def build_by_torch(self, reader: WeightReader) -> built.Layer:
        """Load it for inputs of any shape."""
        weight = None if self.weight is None else reader.tensor(self.weight)
        if self.is_layer_norm:
            return norm_layers.LayerNorm(weight, None if self.bias is None else reader.tensor(self.bias), self.eps)
        return norm_layers.RMSNorm(weight, self.eps)

    def build_of_all_ranks(self, reader: WeightReader) -> built.Layer:
        """Load a rank's part of an RMSNorm."""
        return norm_of_all_ranks(None if self.weight is None else reader.tensor(self.weight), self.eps)

    def of_heads(self, run: Run, over_all: bool = False) -> "NormSpec":
        """That of a rank's heads, where each has weights of its own."""
        refs = self.weight, self.bias
        weight, bias = (ref and (rows(ref, run) if over_all or len(ref.shape) > 1 else ref) for ref in refs)
        return replace(self, weight=weight, bias=bias)


def build_norm(norm: NormSpec | None, kernels: LayerKernels, reader: WeightReader) -> built.Layer:
    """Load a norm; None leaves hidden states as they are."""
    return norm.build(kernels, reader) if norm else built.unchanged


@dataclass(frozen=True, slots=True)
class OutputSpec(PartSpec):
    """The matrix that leads from a half of a block back to the hidden states.

    Attributes:
        norm: Of what the matrix makes; None for none.
        scale: Factor on the outcome.
        is_partial: Whether what the matrices of all ranks make is summed first.
    """

    matrix: WeightRef
    norm: NormSpec | None = None
    scale: float = 1.0
    is_partial: bool = False

    def build(self, kernels: LayerKernels, reader: WeightReader) -> built.Linear:
        """Load it."""
        linear = kernels.linear(self.matrix, reader)
        if self.is_partial:
            linear = LinearWithEpilogue(linear, of_all_ranks(built.unchanged))
        if self.norm is not None:
            linear = LinearWithEpilogue(linear, self.norm.build(kernels, reader))
        return linear if self.scale == 1.0 else LinearWithEpilogue(linear, scaled(built.unchanged, self.scale))

    @override
    def cut(self, cut: Cut) -> Self:
        return replace(self, matrix=cut.by_inputs(self.matrix), is_partial=cut.has_sums)


@dataclass(frozen=True, slots=True)
class HeadNormsSpec(PartSpec):
    """Norms of queries and keys (QK-norm).

    Attributes:
        over_all: Whether the heads of a token are normalised together, not each by itself.
        is_last: Whether the norms come behind the rotary embedding.
        is_partial: Whether all heads are those of all ranks, of which this is one.
    """

    queries: NormSpec
    keys: NormSpec
    over_all: bool = False
    is_last: bool = False
    is_partial: bool = False

    def build(self, kernels: LayerKernels, reader: WeightReader, num_heads: int, num_kv_heads: int) -> built.HeadLayer:
        """Load norms and rotation."""
        if self._is_uniform:
            assert self.queries.weight is not None and self.keys.weight is not None
            weights = reader.tensor(self.queries.weight), reader.tensor(self.keys.weight)
            norm = norm_layers.HeadNorm(*weights, num_heads, num_kv_heads, self.queries.eps)
            return kernels.heads(norm, num_heads, num_kv_heads)
        build = NormSpec.build_of_all_ranks if self.is_partial else NormSpec.build_by_torch
        layers = [build(norm, reader) for norm in (self.queries, self.keys)]
        queries, keys = map(norm_layers.over_all_heads, layers) if self.over_all else layers
        heads = kernels.heads(None, num_heads, num_kv_heads)
        return norm_layers.NormedHeads(heads, queries, keys, num_heads, num_kv_heads, self.is_last)

    def of_heads(self, cut: Cut, queries: Run, keys: Run, dim: int) -> "HeadNormsSpec":
        """Those of a rank's heads, which have dim values."""
        if self.over_all:  # their weights are those of all heads
            queries, keys = (Run(run.first * dim, run.size * dim) for run in (queries, keys))
        own, own_keys = self.queries.of_heads(queries, self.over_all), self.keys.of_heads(keys, self.over_all)
        return replace(self, queries=own, keys=own_keys, is_partial=self.over_all and cut.has_sums)

    @property
    def _is_uniform(self) -> bool:
        """Whether `LayerKernels.heads` computes it: RMSNorm of every head, the same weights, before the rotation."""
        weight = self.queries.weight
        is_plain = weight is not None and len(weight.shape) == 1
        return is_plain and not (self.over_all or self.is_last or self.queries.is_layer_norm)


@dataclass(frozen=True, slots=True)
class BiasSpec(PartSpec):
    """What is added to scores by distance, see `AttentionStep.attend` and `DistanceBias`.

    Attributes:
        weight: (num_buckets, num_heads), of all heads.
        num_positions: Distances are below this.
        heads: Those of a rank; None for all.
    """

    weight: TensorRef
    max_distance: int
    num_positions: int
    is_bidirectional: bool
    heads: Run | None = None

    def build(self, reader: WeightReader) -> torch.Tensor:
        """Load it: (num_heads, 2 * reach); a kernel may look at a chunk of keys behind a query."""
        reach = max(self.num_positions, 512)
        weight = reader.tensor(self.weight)
        if self.heads is not None:
            weight = weight.narrow(1, *self.heads)
        distances = torch.arange(-reach, reach)
        buckets = distance_buckets(distances, self.weight.shape[0], self.max_distance, self.is_bidirectional)
        return weight[buckets.to(weight.device)].t().contiguous()


@dataclass(frozen=True, slots=True)
class AttentionSpec(MixerSpec):
    """`weft.engine.layers.block.Attention`.

    Attributes:
        head_norms: None without QK-norm.
        rotation: Index of the rotary embedding among those of the model.
        clip: Bound on the values of queries, keys and values; None for none.
        sinks: (num_heads,) float32, if the cache's spec says `has_sinks`; None otherwise.
        turns: Whether heads are rotated.
        bias: If the cache's spec says `has_bias`; None otherwise.
    """

    qkv: WeightRef
    head_norms: HeadNormsSpec | None
    output: OutputSpec
    num_heads: int
    cache: PagedKV
    rotation: int = 0
    clip: float | None = None
    sinks: TensorRef | None = None
    turns: bool = True
    bias: BiasSpec | None = None

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> built.Attention:
        heads = (self.num_heads, self.cache.num_kv_heads)
        if self.head_norms:
            prepare = self.head_norms.build(kernels, reader, *heads)
        elif self.turns or not self.cache.is_bidirectional:  # the kernels' heads may also write K/V for later steps
            prepare = kernels.heads(None, *heads)
        else:
            prepare = norm_layers.unchanged_heads(*heads)
        qkv = kernels.linear(self.qkv, reader)
        if self.clip is not None:
            qkv = LinearWithEpilogue(qkv, clamped(built.unchanged, self.clip))
        output = self.output.build(kernels, reader)
        sinks = reader.tensor(self.sinks) if self.sinks else None
        bias = self.bias.build(reader) if self.bias else None
        return built.Attention(qkv, prepare, output, self.cache.head_dim, first_cache, self.rotation, sinks, bias)

    @override
    def cut(self, cut: Cut, gate_size: int = 0) -> Self:
        cache, norms, dim = self.cache, self.head_norms, self.cache.head_dim
        all_heads, all_kv = self.num_heads, cache.num_kv_heads
        if not cut.divides_heads(all_heads, all_kv) or (norms and norms.over_all and norms.queries.is_layer_norm):
            return self
        heads, kv, gate = (all_heads * dim, all_heads), (all_kv * dim, all_kv), (gate_size, all_heads)
        own, own_kv = cut.run(all_heads), cut.run(all_kv)
        slopes = cache.slopes[own.first : own.first + own.size]
        return replace(
            self,
            qkv=cut.by_outputs(self.qkv, heads, kv, kv, *([gate] if gate_size else [])),
            head_norms=norms and norms.of_heads(cut, own, own_kv, dim),
            output=self.output.cut(cut),
            num_heads=own.size,
            cache=replace(cache, num_kv_heads=own_kv.size, num_heads=own.size, slopes=slopes),
            sinks=self.sinks and rows(self.sinks, own),
            bias=self.bias and replace(self.bias, heads=own),
        )


@dataclass(frozen=True, slots=True)
class DenseSpec(FeedForwardSpec):
    """`GatedFeedForward`; first stacks gate and up projection, or is the up projection of a layer without a gate."""

    first: WeightRef
    activation: str
    output: OutputSpec

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader) -> built.FeedForward:
        build_first = kernels.gated if len(self.first.sizes) > 1 else kernels.ungated
        first = build_first(self.first, reader, self.activation)
        return built.GatedFeedForward(first, self.output.build(kernels, reader))

    @override
    def cut(self, cut: Cut) -> Self:
        if not cut.divides(*self.first.sizes):
            return self
        return replace(self, first=cut.inner(self.first), output=self.output.cut(cut))


@dataclass(frozen=True, slots=True)
class PreNormSpec(BlockSpec):
    """`PreNormBlock`; None for a norm or a half that there is not."""

    mixer_norm: NormSpec | None
    mixer: MixerSpec | None
    feed_forward_norm: NormSpec | None
    feed_forward: FeedForwardSpec | None

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> built.Block:
        return built.PreNormBlock(
            build_norm(self.mixer_norm, kernels, reader),
            self.mixer.build(kernels, reader, first_cache) if self.mixer else None,
            build_norm(self.feed_forward_norm, kernels, reader),
            self.feed_forward.build(kernels, reader) if self.feed_forward else None,
        )


@dataclass(frozen=True, slots=True)
class PostNormSpec(BlockSpec):
    """`PostNormBlock`; None for a second half that there is not."""

    mixer: MixerSpec
    mixer_norm: NormSpec
    feed_forward: FeedForwardSpec | None
    feed_forward_norm: NormSpec | None

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> built.Block:
        mixer, mixer_norm = self.mixer.build(kernels, reader, first_cache), self.mixer_norm.build(kernels, reader)
        feed_forward = self.feed_forward.build(kernels, reader) if self.feed_forward else None
        last_norm = build_norm(self.feed_forward_norm, kernels, reader)
        return norm_layers.PostNormBlock(mixer, mixer_norm, feed_forward, last_norm)


@dataclass(frozen=True, slots=True)
class ParallelSpec(BlockSpec):
    """`ParallelBlock`; feed_forward_norm is None if both halves share a norm."""

    mixer_norm: NormSpec
    mixer: MixerSpec
    feed_forward_norm: NormSpec | None
    feed_forward: FeedForwardSpec

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> built.Block:
        return norm_layers.ParallelBlock(
            self.mixer_norm.build(kernels, reader),
            self.mixer.build(kernels, reader, first_cache),
            self.feed_forward_norm.build(kernels, reader) if self.feed_forward_norm else None,
            self.feed_forward.build(kernels, reader),
        )


@dataclass(frozen=True, slots=True)
class DecoderSpec(PartSpec):
    """A whole decoder.

    Attributes:
        embedding: None for a later pipeline stage, which gets hidden states.
        norm: Behind the last block; None for none.
        head: None if the output head shares the matrix of the embedding.
        positions: A learned embedding of positions; None for none.
        token_types: A learned embedding of the types of tokens; None for none.
        layer_embedding: An embedding of tokens for `LayerInputs`, the first block; None for none.
        embedding_norm: Of the embeddings; None for none.
        logit_bias: (1, vocab_size), added to logits; None for none.
        encoder: Whose result the blocks read; None for none. It has no embedding if that is the decoder's.
        front: Of an encoder that reads sound; None for an embedding.
    """

    embedding: WeightRef | None
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec | None
    head: WeightRef | None
    positions: WeightRef | None = None
    embedding_norm: NormSpec | None = None
    token_types: WeightRef | None = None
    layer_embedding: WeightRef | None = None
    logit_bias: TensorRef | None = None
    encoder: "DecoderSpec | None" = None
    front: PartSpec | None = None

    @property
    @override
    def caches(self) -> tuple[CacheSpec, ...]:
        """Those of all blocks; layers of equal specs share one that no later step reads."""
        caches = tuple(cache for block in self.blocks for cache in block.caches)
        return tuple(dict.fromkeys(caches)) if any(cache.is_bidirectional for cache in caches) else caches

    def first_caches(self) -> Iterator[int]:
        """For each block the index of its first cache."""
        caches, num_caches = self.caches, 0
        for block in self.blocks:
            is_shared = any(cache.is_bidirectional for cache in block.caches)
            yield caches.index(block.caches[0]) if is_shared else num_caches
            num_caches += len(block.caches)

    @property
    def matrices(self) -> tuple[WeightRef, ...]:
        """Every matrix that inputs are multiplied with, in order."""
        inner = (weight for block in self.blocks for weight in block.weights if isinstance(weight, WeightRef))
        last = self.head or self.embedding
        return (*inner, last) if last else tuple(inner)

    @property
    def feed_forwards(self) -> Iterator[FeedForwardSpec]:
        """Every feed-forward layer in order, those within others, too."""
        return (part for part in _values(self) if isinstance(part, FeedForwardSpec))

    @property
    def num_parameters(self) -> int:
        """Values in the checkpoint; a shared matrix counts once."""
        return sum(weight.num_values for weight in self.weights)

    def weights_bytes(self, kernels: LayerKernels, dtype: torch.dtype) -> int:
        """Bytes in memory, from the shapes alone."""
        if self.encoder is not None:
            return sum(part.weights_bytes(kernels, dtype) for part in (self.encoder, replace(self, encoder=None)))
        inner = self.matrices[:-1] if self.embedding else self.matrices
        num_bytes = sum(kernels.linear_bytes(matrix, dtype) for matrix in inner)
        num_bytes += sum(small.num_bytes(dtype) for small in self.weights if isinstance(small, TensorRef))
        num_bytes += sum(layer.experts_bytes(kernels, dtype) for layer in self.feed_forwards)
        if self.positions is not None:
            num_types = self.token_types.out_features if self.token_types else 1
            num_bytes += num_types * self.positions.num_values * dtype.itemsize
        if self.layer_embedding is not None:
            num_bytes += self.layer_embedding.num_values * dtype.itemsize
        if self.embedding is None:
            return num_bytes
        if self.head is None:
            return num_bytes + kernels.tied_bytes(self.embedding, dtype)
        return num_bytes + kernels.linear_bytes(self.head, dtype) + self.embedding.num_values * dtype.itemsize

    @override
    def cut(self, cut: Cut) -> Self:
        cut = replace(cut, caches=self.caches)
        return replace(
            self,
            embedding=self.embedding and cut.vocabulary(self.embedding),
            head=self.head and cut.vocabulary(self.head),
            layer_embedding=self.layer_embedding and cut.vocabulary(self.layer_embedding),
            blocks=tuple(block.cut(cut) for block in self.blocks),
            encoder=self.encoder and self.encoder.cut(cut),
        )
