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

from weft.engine.cache.specs import CacheSpec, PagedKV, StateSpec
from weft.engine.models.experts import ExpertsSpec
from weft.engine.models.experts_beside import ExpertsBesideSpec
from weft.engine.models.latent_attention import LatentAttentionSpec
from weft.engine.models.layer_inputs import LayeredSpec
from weft.engine.models.linear_attention import (
    ConvolutionSpec,
    GatedAttentionSpec,
    GatedDeltaSpec,
    GatedRecurrenceSpec,
    ShortConvolutionSpec,
)
from weft.engine.models.mamba import Mamba2Spec, MambaSpec, ParallelMixersSpec
from weft.engine.models.shared_attention import ReadingSpec, SharingSpec
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
from weft.engine.models.tuned_attention import TunedAttentionSpec
from weft.engine.weights.refs import Run, Share, TensorRef, WeightRef


def shard(spec: DecoderSpec, rank: int, num_ranks: int, *, has_sums: bool = True) -> DecoderSpec:
    """What a rank computes of a decoder.

    Args:
        has_sums: False leaves out what ranks exchange inside blocks, so that one can be tried alone.
    """
    if num_ranks == 1:
        return spec
    sharding = _Sharding(rank, num_ranks, spec.caches, has_sums)
    return replace(
        spec,
        embedding=spec.embedding and sharding.vocabulary(spec.embedding),
        head=spec.head and sharding.vocabulary(spec.head),
        layer_embedding=spec.layer_embedding and sharding.vocabulary(spec.layer_embedding),
        blocks=tuple(map(sharding.block, spec.blocks)),
    )


def whole_parts(spec: DecoderSpec, part: DecoderSpec) -> Counter[str]:
    """The kinds of mixers and feed-forward layers that are whole on every rank, and in how many blocks."""
    return Counter(
        type(half).__name__.removesuffix("Spec")
        for block, own in zip(spec.blocks, part.blocks, strict=True)
        for half, of_rank in zip(_halves(block), _halves(own), strict=True)
        if half is of_rank
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

    rank: int
    num_ranks: int
    caches: Sequence[CacheSpec]
    has_sums: bool

    def vocabulary(self, matrix: WeightRef) -> WeightRef:
        first, end = (matrix.out_features * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        return _part(matrix, (Run(first, end - first),))

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
                return self._gated_delta(mixer)
            case ShortConvolutionSpec():
                return self._short_convolution(mixer)
            case GatedRecurrenceSpec():
                return self._gated_recurrence(mixer)
            case MambaSpec():
                return self._mamba(mixer)
            case Mamba2Spec():
                return self._mamba2(mixer)
            case ParallelMixersSpec(mixers, widths):
                own = tuple(map(self._mixer, mixers))
                pairs = zip(mixers, own, widths, strict=True)
                widths = tuple(width if part is whole else width // self.num_ranks for whole, part, width in pairs)
                return replace(mixer, mixers=own, widths=widths)
        return mixer

    def _attention(self, mixer: AttentionSpec, gate_size: int = 0) -> AttentionSpec:
        cache, all_heads, all_kv = mixer.cache, mixer.num_heads, mixer.cache.num_kv_heads
        norms, sinks, dim = mixer.head_norms, mixer.sinks, cache.head_dim
        if not self._divides_heads(all_heads, all_kv) or (norms and norms.over_all and norms.queries.is_layer_norm):
            return mixer
        heads, kv, gate = (all_heads * dim, all_heads), (all_kv * dim, all_kv), (gate_size, all_heads)
        own, own_kv = self._run(all_heads), self._run(all_kv)
        return replace(
            mixer,
            qkv=self._by_outputs(mixer.qkv, heads, kv, kv, *([gate] if gate_size else [])),
            head_norms=self._head_norms(norms, own, own_kv, dim) if norms else None,
            output=self._output(mixer.output),
            num_heads=own.size,
            cache=replace(
                cache,
                num_kv_heads=own_kv.size,
                num_heads=own.size,
                slopes=cache.slopes[own.first : own.first + own.size],
            ),
            sinks=_rows(sinks, own) if sinks else None,
        )

    def _around(
        self, mixer: GatedAttentionSpec | SharingSpec | TunedAttentionSpec, attention: AttentionSpec
    ) -> MixerSpec:
        if attention is mixer.attention:
            return mixer
        if isinstance(mixer, GatedAttentionSpec):
            mixer = replace(mixer, gate_size=mixer.gate_size // self.num_ranks)
        return replace(mixer, attention=attention)

    def _head_norms(self, norms: HeadNormsSpec, queries: Run, keys: Run, dim: int) -> HeadNormsSpec:
        if norms.over_all:  # their weights are those of all heads
            queries, keys = (Run(run.first * dim, run.size * dim) for run in (queries, keys))
        queries_norm, keys_norm = (
            _head_norm(norm, run, norms.over_all) for norm, run in ((norms.queries, queries), (norms.keys, keys))
        )
        return replace(norms, queries=queries_norm, keys=keys_norm, is_partial=norms.over_all and self.has_sums)

    def _reading(self, mixer: ReadingSpec) -> MixerSpec:
        """Divided as the attention that it reads from is."""
        cache, num_heads = self.caches[mixer.source], mixer.queries.out_features // mixer.head_dim
        if not isinstance(cache, PagedKV) or not self._divides_heads(num_heads, cache.num_kv_heads):
            return mixer
        queries = self._by_outputs(mixer.queries, (mixer.queries.out_features, num_heads))
        norm = _head_norm(mixer.norm, self._run(num_heads))
        return replace(mixer, queries=queries, norm=norm, output=self._output(mixer.output))

    def _latent_attention(self, mixer: LatentAttentionSpec) -> MixerSpec:
        sizes = mixer.sizes
        if not self._divides(sizes.num_heads):
            return mixer
        num_heads, queries, by_heads = (
            sizes.num_heads // self.num_ranks,
            mixer.queries,
            (sizes.queries, sizes.num_heads),
        )
        first = (sizes.query_latent, 1) if sizes.query_latent else by_heads
        return replace(
            mixer,
            inputs=self._by_outputs(mixer.inputs, first, (sizes.key, 1)),
            queries=queries and (queries[0], self._by_outputs(queries[1], by_heads)),
            keys_values=self._by_outputs(mixer.keys_values, (mixer.keys_values.out_features, sizes.num_heads)),
            output=self._output(mixer.output),
            sizes=replace(sizes, num_heads=num_heads),
            cache=replace(mixer.cache, num_heads=num_heads),
        )

    def _gated_delta(self, mixer: GatedDeltaSpec) -> MixerSpec:
        sizes = mixer.sizes
        if not self._divides_heads(sizes.num_heads, sizes.num_key_heads):
            return mixer
        keys, values, heads = (
            (sizes.keys, sizes.num_key_heads),
            (sizes.values, sizes.num_heads),
            (sizes.num_heads, sizes.num_heads),
        )
        own, own_keys = self._run(sizes.num_heads), self._run(sizes.num_key_heads)
        sizes = replace(sizes, num_heads=own.size, num_key_heads=own_keys.size)
        qkv = (keys, keys, values)
        parts = ((*qkv, values, heads, heads),) if len(mixer.projections) == 1 else ((*qkv, values), (heads, heads))
        splits = (2 * sizes.keys + sizes.values, sizes.values), (own.size, own.size)
        pairs = zip(mixer.projections, parts, strict=True)
        return replace(
            mixer,
            projections=tuple(self._by_outputs(matrix, *of_matrix) for matrix, of_matrix in pairs),
            splits=splits if len(parts) > 1 else ((*splits[0], *splits[1]),),
            convolution=self._convolution(mixer.convolution, *qkv),
            decay_log=_rows(mixer.decay_log, own),
            decay_bias=_rows(mixer.decay_bias, own),
            output=self._output(mixer.output),
            sizes=sizes,
            state=self._state(mixer.state),
        )

    def _short_convolution(self, mixer: ShortConvolutionSpec) -> MixerSpec:
        channels = mixer.convolution.cache.shape[0]
        if not self._divides(channels):
            return mixer
        part = channels, channels
        inputs, convolution = (
            self._by_outputs(mixer.inputs, part, part, part),
            self._convolution(mixer.convolution, part),
        )
        return replace(mixer, inputs=inputs, convolution=convolution, output=self._output(mixer.output))

    def _gated_recurrence(self, mixer: GatedRecurrenceSpec) -> MixerSpec:
        (width,), num_blocks = mixer.state.shape, mixer.gate_weights[0].shape[0]
        if not self._divides(num_blocks):
            return mixer
        part, blocks = (width, width), self._run(num_blocks)
        return replace(
            mixer,
            inputs=self._by_outputs(mixer.inputs, part, part),
            convolution=self._convolution(mixer.convolution, part),
            gate_weights=tuple(_rows(gate, blocks) for gate in mixer.gate_weights),
            gate_biases=tuple(_rows(gate, blocks) for gate in mixer.gate_biases),
            rate=_rows(mixer.rate, self._run(width)),
            output=self._output(mixer.output),
            state=self._state(mixer.state),
        )

    def _mamba(self, mixer: MambaSpec) -> MixerSpec:
        width = mixer.cache.shape[0]
        if not self._divides(width):
            return mixer
        part, own = (width, width), self._run(width)
        return replace(
            mixer,
            inputs=self._by_outputs(mixer.inputs, part, part),
            convolution=self._convolution(mixer.convolution, part),
            selection=self._by_inputs(mixer.selection),
            is_partial=self.has_sums,
            times=self._by_outputs(mixer.times, part),
            decays=_rows(mixer.decays, own),
            skips=_rows(mixer.skips, own),
            time_bias=_rows(mixer.time_bias, own),
            output=self._output(mixer.output),
            cache=self._state(mixer.cache),
        )

    def _mamba2(self, mixer: Mamba2Spec) -> MixerSpec:
        """A norm is over the heads of a group, so a group with a norm is not divided."""
        switches, num_heads, num_groups = mixer.switches, mixer.switches.num_heads, mixer.switches.num_groups
        if not self._divides_heads(num_heads, num_groups) or (mixer.norm and not self._divides(num_groups)):
            return mixer
        width, shared = (switches.width, num_heads), (num_groups * switches.state_size, num_groups)
        own = self._run(num_heads)
        return replace(
            mixer,
            inputs=self._by_outputs(mixer.inputs, width, width, shared, shared, (num_heads, num_heads)),
            convolution=self._convolution(mixer.convolution, width, shared, shared),
            decays=_rows(mixer.decays, own),
            skips=_rows(mixer.skips, own),
            time_bias=_rows(mixer.time_bias, own),
            norm=mixer.norm and _rows(mixer.norm, *self._runs(width)),
            output=self._output(mixer.output),
            switches=replace(switches, num_heads=own.size, num_groups=self._run(num_groups).size),
            cache=self._state(mixer.cache),
        )

    def _convolution(self, convolution: ConvolutionSpec, *parts: tuple[int, int]) -> ConvolutionSpec:
        runs, (_, kernel) = self._runs(*parts), convolution.cache.shape
        factors = [factor for _, factor in convolution.scales]
        return replace(
            convolution,
            weight=_rows(convolution.weight, *runs),
            bias=convolution.bias and _rows(convolution.bias, *runs),
            cache=replace(convolution.cache, shape=(sum(run.size for run in runs), kernel)),
            scales=tuple((run.size, factor) for run, factor in zip(runs, factors, strict=False)),
        )

    def _state(self, state: StateSpec) -> StateSpec:
        first, *others = state.shape
        return replace(state, shape=(first // self.num_ranks, *others))

    def _feed_forward(self, part: FeedForwardSpec) -> FeedForwardSpec:
        match part:
            case DenseSpec() if self._divides(*part.first.sizes):
                return replace(part, first=self._inner(part.first), output=self._output(part.output))
            case ExpertsSpec():
                return self._experts(part)
            case ExpertsBesideSpec():
                experts, dense = self._experts(part.experts), self._feed_forward(part.dense)
                return replace(part, experts=experts, dense=dense)
        return part

    def _experts(self, part: ExpertsSpec) -> ExpertsSpec:
        """The shared expert is summed with the others, so all are divided or none is."""
        shared = part.shared and self._feed_forward(part.shared)
        if not self._divides(*part.gate_up.matrix.sizes) or (shared and shared is part.shared):
            return part
        if isinstance(shared, DenseSpec):
            shared = replace(shared, output=replace(shared.output, is_partial=False))
        gate_up = replace(part.gate_up, matrix=self._inner(part.gate_up.matrix))
        down = replace(part.down, matrix=self._by_inputs(part.down.matrix))
        return replace(part, gate_up=gate_up, down=down, shared=shared, is_partial=self.has_sums)

    def _inner(self, matrix: WeightRef) -> WeightRef:
        return self._by_outputs(matrix, *((size, size) for size in matrix.sizes))

    def _output(self, output: OutputSpec) -> OutputSpec:
        return replace(output, matrix=self._by_inputs(output.matrix), is_partial=self.has_sums)

    def _by_inputs(self, matrix: WeightRef) -> WeightRef:
        """The first rank alone adds the bias."""
        num_inputs = matrix.in_features // self.num_ranks
        share = Share(matrix.sizes, (Run(0, matrix.out_features),), matrix.in_features, self.rank * num_inputs)
        has_bias = matrix.has_bias and self.rank == 0
        return replace(matrix, in_features=num_inputs, has_bias=has_bias, share=share)

    def _by_outputs(self, matrix: WeightRef, *parts: tuple[int, int]) -> WeightRef:
        """See `_runs`; the parts are all of the matrix."""
        assert sum(size for size, _ in parts) == matrix.out_features
        return _part(matrix, self._runs(*parts))

    def _runs(self, *parts: tuple[int, int]) -> tuple[Run, ...]:
        """Where this rank's part of each of several parts lies, which follow each other: their sizes and heads."""
        start, runs = 0, []
        for size, num_heads in parts:
            own, each = self._run(num_heads), size // num_heads
            runs.append(Run(start + own.first * each, own.size * each))
            start += size
        return tuple(runs)

    def _run(self, num_heads: int) -> Run:
        """The heads of this rank; where there are fewer than ranks, several have the same one."""
        return Run(self.rank * num_heads // self.num_ranks, max(num_heads // self.num_ranks, 1))

    def _divides_heads(self, num_heads: int, num_shared: int) -> bool:
        """Whether a rank gets whole heads with all that they share."""
        return self._divides(num_heads) and not max(num_shared, self.num_ranks) % min(num_shared, self.num_ranks)

    def _divides(self, *sizes: int) -> bool:
        return not any(size % self.num_ranks for size in sizes)


def _part(matrix: WeightRef, runs: tuple[Run, ...]) -> WeightRef:
    """Runs of a matrix's outputs; where they are not parts of its projections, one by one, they count as one."""
    sizes = tuple(run.size for run in runs)
    sizes = sizes if len(sizes) == len(matrix.sizes) else (sum(sizes),)
    return replace(matrix, sizes=sizes, share=Share(matrix.sizes, runs, matrix.in_features))


def _head_norm(norm: NormSpec, run: Run, over_all: bool = False) -> NormSpec:
    """Heads of which each has weights of its own are divided."""
    weight, bias = (
        ref and (_rows(ref, run) if over_all or len(ref.shape) > 1 else ref) for ref in (norm.weight, norm.bias)
    )
    return replace(norm, weight=weight, bias=bias)


def _rows(tensor: TensorRef, *runs: Run) -> TensorRef:
    shape = (sum(run.size for run in runs), *tensor.shape[1:])
    return replace(tensor, shape=shape, whole=tensor.shape[0], runs=runs)
