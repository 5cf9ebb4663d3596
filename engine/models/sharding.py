"""Divides the description of a decoder among ranks (tensor parallelism), before anything is loaded.

A rank has some heads of every mixer and some inner values of every feed-forward layer and expert: the matrices before
them are divided by outputs, those behind them by inputs. What the ranks make is summed, once in each half of a block,
before it is added to the hidden states (Shoeybi et al., 2019, section 3). Ranks share K/V heads, and what else heads
share, where there are fewer than ranks. A latent cache is whole on every rank. Embedding and output head are divided by
the ids of the vocabulary. What cannot be divided, such as norms and routers, is whole on every rank, which then makes
all of it alone.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft.engine.cache.specs import CacheSpec, PagedKV
from weft.engine.describe.specs import (
    AttentionSpec,
    BlockSpec,
    DecoderSpec,
    DenseSpec,
    FeedForwardSpec,
    HeadNormsSpec,
    MixerSpec,
    ParallelSpec,
    PartSpec,
    PostNormSpec,
    PreNormSpec,
)
from weft.engine.models import cut as cut_states
from weft.engine.models.cut import Cut, head_norm, rows
from weft.engine.parts.attention import ReadingSpec, SharingSpec, TunedAttentionSpec
from weft.engine.parts.experts import ExpertsBesideSpec, ExpertsSpec
from weft.engine.parts.latent_attention import LatentAttentionSpec
from weft.engine.parts.layer_inputs import LayeredSpec
from weft.engine.parts.linear_attention import (
    GatedAttentionSpec,
    GatedDeltaSpec,
    GatedRecurrenceSpec,
    ShortConvolutionSpec,
)
from weft.engine.parts.mamba import Mamba2Spec, MambaSpec, ParallelMixersSpec
from weft.engine.weights.reader import Run


def shard(spec: DecoderSpec, rank: int, num_ranks: int, *, has_sums: bool = True) -> DecoderSpec:
    """What a rank computes of a decoder.

    Args:
        has_sums: False leaves out what ranks exchange inside blocks, so that one can be tried alone.
    """
    if num_ranks == 1:
        return spec
    cut = Cut(rank, num_ranks, has_sums)
    return replace(
        spec,
        embedding=spec.embedding and cut.vocabulary(spec.embedding),
        head=spec.head and cut.vocabulary(spec.head),
        layer_embedding=spec.layer_embedding and cut.vocabulary(spec.layer_embedding),
        blocks=tuple(map(_Sharding(cut, spec.caches).block, spec.blocks)),
    )


def whole_parts(spec: DecoderSpec, part: DecoderSpec) -> Counter[str]:
    """The kinds of mixers and feed-forward layers that are whole on every rank, and in how many blocks."""
    return Counter(
        type(half).__name__.removesuffix("Spec")
        for block, own in zip(spec.blocks, part.blocks, strict=True)
        for half, of_rank in zip(_halves(block), _halves(own), strict=True)
        if half == of_rank
    )


def _halves(block: BlockSpec) -> Iterable[PartSpec]:
    match block:
        case LayeredSpec():
            return _halves(block.block)
        case PreNormSpec() | PostNormSpec() | ParallelSpec():
            return [half for half in (block.mixer, block.feed_forward) if half]
    return []


@dataclass(frozen=True, slots=True)
class _Sharding:
    """Makes the parts of one rank; a part that it returns as it is is whole on every rank."""

    cut: Cut
    caches: Sequence[CacheSpec]

    def block(self, block: BlockSpec) -> BlockSpec:
        match block:
            case LayeredSpec():
                return replace(block, block=self.block(block.block))
            case PreNormSpec(_, mixer, _, feed_forward):
                mixer, feed_forward = mixer and self._mixer(mixer), feed_forward and self._feed_forward(feed_forward)
                return replace(block, mixer=mixer, feed_forward=feed_forward)
            case PostNormSpec() | ParallelSpec():
                feed_forward = self._feed_forward(block.feed_forward)
                return replace(block, mixer=self._mixer(block.mixer), feed_forward=feed_forward)
        return block

    def _mixer(self, mixer: MixerSpec) -> MixerSpec:
        match mixer:
            case AttentionSpec():
                return self._attention(mixer)
            case GatedAttentionSpec():
                return self._around(mixer, self._attention(mixer.attention, mixer.gate_size))
            case SharingSpec() | TunedAttentionSpec():
                return self._around(mixer, self._attention(mixer.attention))
            case ReadingSpec():
                return self._reading(mixer)
            case LatentAttentionSpec():
                return self._latent_attention(mixer)
            case GatedDeltaSpec():
                return cut_states.gated_delta(self.cut, mixer)
            case ShortConvolutionSpec():
                return cut_states.short_convolution(self.cut, mixer)
            case GatedRecurrenceSpec():
                return cut_states.gated_recurrence(self.cut, mixer)
            case MambaSpec():
                return cut_states.mamba(self.cut, mixer)
            case Mamba2Spec():
                return cut_states.mamba2(self.cut, mixer)
            case ParallelMixersSpec(mixers, widths):
                own = tuple(map(self._mixer, mixers))
                pairs = zip(mixers, own, widths, strict=True)
                widths = tuple(width if part is whole else width // self.cut.num_ranks for whole, part, width in pairs)
                return replace(mixer, mixers=own, widths=widths)
        return mixer

    def _attention(self, mixer: AttentionSpec, gate_size: int = 0) -> AttentionSpec:
        cache, all_heads, all_kv = mixer.cache, mixer.num_heads, mixer.cache.num_kv_heads
        norms, sinks, dim = mixer.head_norms, mixer.sinks, cache.head_dim
        if not self.cut.divides_heads(all_heads, all_kv) or (norms and norms.over_all and norms.queries.is_layer_norm):
            return mixer
        heads, kv, gate = (all_heads * dim, all_heads), (all_kv * dim, all_kv), (gate_size, all_heads)
        own, own_kv = self.cut.run(all_heads), self.cut.run(all_kv)
        return replace(
            mixer,
            qkv=self.cut.by_outputs(mixer.qkv, heads, kv, kv, *([gate] if gate_size else [])),
            head_norms=self._head_norms(norms, own, own_kv, dim) if norms else None,
            output=self.cut.output(mixer.output),
            num_heads=own.size,
            cache=replace(
                cache,
                num_kv_heads=own_kv.size,
                num_heads=own.size,
                slopes=cache.slopes[own.first : own.first + own.size],
            ),
            sinks=rows(sinks, own) if sinks else None,
        )

    def _around(
        self, mixer: GatedAttentionSpec | SharingSpec | TunedAttentionSpec, attention: AttentionSpec
    ) -> MixerSpec:
        if attention is mixer.attention:
            return mixer
        if isinstance(mixer, GatedAttentionSpec):
            mixer = replace(mixer, gate_size=mixer.gate_size // self.cut.num_ranks)
        return replace(mixer, attention=attention)

    def _head_norms(self, norms: HeadNormsSpec, queries: Run, keys: Run, dim: int) -> HeadNormsSpec:
        if norms.over_all:  # their weights are those of all heads
            queries, keys = (Run(run.first * dim, run.size * dim) for run in (queries, keys))
        queries_norm, keys_norm = (
            head_norm(norm, run, norms.over_all) for norm, run in ((norms.queries, queries), (norms.keys, keys))
        )
        return replace(norms, queries=queries_norm, keys=keys_norm, is_partial=norms.over_all and self.cut.has_sums)

    def _reading(self, mixer: ReadingSpec) -> MixerSpec:
        """Divided as the attention that it reads from is."""
        cache, num_heads = self.caches[mixer.source], mixer.queries.out_features // mixer.head_dim
        if not isinstance(cache, PagedKV) or not self.cut.divides_heads(num_heads, cache.num_kv_heads):
            return mixer
        queries = self.cut.by_outputs(mixer.queries, (mixer.queries.out_features, num_heads))
        norm = head_norm(mixer.norm, self.cut.run(num_heads))
        return replace(mixer, queries=queries, norm=norm, output=self.cut.output(mixer.output))

    def _latent_attention(self, mixer: LatentAttentionSpec) -> MixerSpec:
        sizes = mixer.sizes
        if not self.cut.divides(sizes.num_heads):
            return mixer
        num_heads, queries, by_heads = (
            sizes.num_heads // self.cut.num_ranks,
            mixer.queries,
            (sizes.queries, sizes.num_heads),
        )
        first = (sizes.query_latent, 1) if sizes.query_latent else by_heads
        return replace(
            mixer,
            inputs=self.cut.by_outputs(mixer.inputs, first, (sizes.key, 1)),
            queries=queries and (queries[0], self.cut.by_outputs(queries[1], by_heads)),
            keys_values=self.cut.by_outputs(mixer.keys_values, (mixer.keys_values.out_features, sizes.num_heads)),
            output=self.cut.output(mixer.output),
            sizes=replace(sizes, num_heads=num_heads),
            cache=replace(mixer.cache, num_heads=num_heads),
        )

    def _feed_forward(self, part: FeedForwardSpec) -> FeedForwardSpec:
        match part:
            case DenseSpec() if self.cut.divides(*part.first.sizes):
                return replace(part, first=self.cut.inner(part.first), output=self.cut.output(part.output))
            case ExpertsSpec():
                return self._experts(part)
            case ExpertsBesideSpec():
                experts, dense = self._experts(part.experts), self._feed_forward(part.dense)
                return replace(part, experts=experts, dense=dense)
        return part

    def _experts(self, part: ExpertsSpec) -> ExpertsSpec:
        """The shared expert is summed with the others, so all are divided or none is."""
        shared = part.shared and self._feed_forward(part.shared)
        if not self.cut.divides(*part.gate_up.matrix.sizes) or (shared and shared is part.shared):
            return part
        if isinstance(shared, DenseSpec):
            shared = replace(shared, output=replace(shared.output, is_partial=False))
        gate_up = replace(part.gate_up, matrix=self.cut.inner(part.gate_up.matrix))
        down = replace(part.down, matrix=self.cut.by_inputs(part.down.matrix))
        return replace(part, gate_up=gate_up, down=down, shared=shared, is_partial=self.cut.has_sums)
