"""Divides the description of a decoder among ranks (tensor parallelism), before anything is loaded.

A rank has some heads of every attention layer and some inner values of every feed-forward layer and expert: the
matrices before them are divided by outputs, those behind them by inputs. What the ranks make is summed, once in each
half of a block, before it is added to the hidden states (Shoeybi et al., 2019, section 3). Ranks share K/V heads where
there are fewer than ranks. Embeddings, norms, routers and output heads are whole on every rank.
"""

from dataclasses import dataclass, replace
from typing import NoReturn

from weft.engine.models.experts import ExpertsSpec
from weft.engine.models.specs import (
    AttentionSpec,
    BlockSpec,
    DecoderSpec,
    DenseSpec,
    FeedForwardSpec,
    HeadNormsSpec,
    MixerSpec,
    NormSpec,
    OutputSpec,
    ParallelSpec,
    PartSpec,
    PostNormSpec,
    PreNormSpec,
)
from weft.engine.shared.errors import ModelError
from weft.engine.weights.refs import Share, TensorRef, WeightRef


def shard(spec: DecoderSpec, rank: int, num_ranks: int) -> DecoderSpec:
    """What a rank computes of a decoder.

    Raises:
        ModelError: The ranks cannot divide some part of it.
    """
    if num_ranks == 1:
        return spec
    sharding = _Sharding(rank, num_ranks)
    return replace(spec, blocks=tuple(map(sharding.block, spec.blocks)))


@dataclass(frozen=True, slots=True)
class _Sharding:
    """Makes the parts of one rank."""

    rank: int
    num_ranks: int

    def block(self, block: BlockSpec) -> BlockSpec:
        match block:
            case PreNormSpec(_, mixer, _, feed_forward):
                mixer, feed_forward = mixer and self._mixer(mixer), feed_forward and self._feed_forward(feed_forward)
                return replace(block, mixer=mixer, feed_forward=feed_forward)
            case PostNormSpec() | ParallelSpec():
                feed_forward = self._feed_forward(block.feed_forward)
                return replace(block, mixer=self._mixer(block.mixer), feed_forward=feed_forward)
        self._refuse_part(block)

    def _mixer(self, mixer: MixerSpec) -> MixerSpec:
        if not isinstance(mixer, AttentionSpec):
            self._refuse_part(mixer)
        cache, all_heads, all_kv = mixer.cache, mixer.num_heads, mixer.cache.num_kv_heads
        if all_heads % self.num_ranks or max(all_kv, self.num_ranks) % min(all_kv, self.num_ranks):
            self._refuse(f"{all_heads} heads over {all_kv} K/V heads")
        num_heads, num_kv_heads = all_heads // self.num_ranks, max(all_kv // self.num_ranks, 1)
        first, first_kv = self.rank * num_heads, self.rank * all_kv // self.num_ranks
        norms, sinks, dim = mixer.head_norms, mixer.sinks, cache.head_dim
        kv = num_kv_heads * dim, first_kv * dim
        return replace(
            mixer,
            qkv=_by_outputs(mixer.qkv, (num_heads * dim, first * dim), kv, kv),
            head_norms=self._head_norms(norms, (num_heads, first), (num_kv_heads, first_kv)) if norms else None,
            output=self._output(mixer.output),
            num_heads=num_heads,
            cache=replace(
                cache,
                num_kv_heads=num_kv_heads,
                num_heads=num_heads,
                slopes=cache.slopes[first : first + num_heads],
            ),
            sinks=_rows(sinks, num_heads, first) if sinks else None,
        )

    def _head_norms(self, norms: HeadNormsSpec, queries: tuple[int, int], keys: tuple[int, int]) -> HeadNormsSpec:
        if norms.over_all:
            self._refuse("norms over all heads")
        return replace(norms, queries=_head_norm(norms.queries, *queries), keys=_head_norm(norms.keys, *keys))

    def _feed_forward(self, part: FeedForwardSpec) -> FeedForwardSpec:
        match part:
            case DenseSpec():
                return replace(part, first=self._inner(part.first), output=self._output(part.output))
            case ExpertsSpec():
                shared = part.shared and self._feed_forward(part.shared)
                if isinstance(shared, DenseSpec):  # summed with the others
                    shared = replace(shared, output=replace(shared.output, is_partial=False))
                return replace(
                    part,
                    gate_up=replace(part.gate_up, matrix=self._inner(part.gate_up.matrix)),
                    down=replace(part.down, matrix=self._by_inputs(part.down.matrix)),
                    shared=shared,
                    is_partial=True,
                )
        self._refuse_part(part)

    def _inner(self, matrix: WeightRef) -> WeightRef:
        if any(size % self.num_ranks for size in matrix.sizes):
            self._refuse(f"{matrix.sizes[0]} values of a feed-forward layer")
        sizes = [size // self.num_ranks for size in matrix.sizes]
        return _by_outputs(matrix, *((size, self.rank * size) for size in sizes))

    def _output(self, output: OutputSpec) -> OutputSpec:
        return replace(output, matrix=self._by_inputs(output.matrix), is_partial=True)

    def _by_inputs(self, matrix: WeightRef) -> WeightRef:
        """The first rank alone adds the bias."""
        num_inputs = matrix.in_features // self.num_ranks
        share = Share(matrix.sizes, (0,) * len(matrix.sizes), matrix.in_features, self.rank * num_inputs)
        has_bias = matrix.has_bias and self.rank == 0
        return replace(matrix, in_features=num_inputs, has_bias=has_bias, share=share)

    def _refuse_part(self, part: PartSpec) -> NoReturn:
        self._refuse(f"layers of the kind {type(part).__name__.removesuffix('Spec')}")

    def _refuse(self, what: str) -> NoReturn:
        raise ModelError(f"tensor_parallel_size {self.num_ranks}: ranks cannot divide {what} of this model")


def _by_outputs(matrix: WeightRef, *parts: tuple[int, int]) -> WeightRef:
    """Parts: of each projection the number of outputs and the first of them."""
    sizes, starts = zip(*parts, strict=True)
    return replace(matrix, sizes=sizes, share=Share(matrix.sizes, starts, matrix.in_features))


def _head_norm(norm: NormSpec, num_heads: int, first: int) -> NormSpec:
    """Heads of which each has weights of its own are divided."""
    weight, bias = (
        ref and (_rows(ref, num_heads, first) if len(ref.shape) > 1 else ref) for ref in (norm.weight, norm.bias)
    )
    return replace(norm, weight=weight, bias=bias)


def _rows(tensor: TensorRef, num_rows: int, first: int) -> TensorRef:
    return replace(tensor, shape=(num_rows, *tensor.shape[1:]), whole=tensor.shape[0], first=first)
