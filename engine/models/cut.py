"""Cuts the description of a decoder for its processes: heads and channels for ranks, blocks for pipeline stages.

`Cut` cuts the matrices and vectors of one part for a rank. The functions behind it cut mixers that keep states; one
that cannot be cut is returned as it is. `sharding.py` cuts whole blocks with both.

`find_stages` divides the blocks: each stage has some neighbouring ones and their caches. The first stage also has the
embeddings, the final norm and the output head. All processes find the same borders.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from weft.engine.cache.specs import CacheGroup, CacheSpec, StateSpec, group_layers
from weft.engine.describe.specs import BlockSpec, DecoderSpec, MixerSpec, NormSpec, OutputSpec
from weft.engine.parts.attention import ReadingSpec
from weft.engine.parts.layer_inputs import LayeredSpec, LayerInputsSpec
from weft.engine.parts.linear_attention import (
    ConvolutionSpec,
    GatedDeltaSpec,
    GatedRecurrenceSpec,
    ShortConvolutionSpec,
)
from weft.engine.parts.mamba import Mamba2Spec, MambaSpec
from weft.engine.weights.reader import ExpertsRef, Run, Share, TensorRef, WeightRef
from weft.engine.wire.errors import ModelError


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank gets.

    Attributes:
        has_sums: Whether what the ranks make is summed.
    """

    rank: int
    num_ranks: int
    has_sums: bool

    def vocabulary(self, matrix: WeightRef) -> WeightRef:
        """The rows of this rank's ids, whose number need not divide evenly."""
        first, end = (matrix.out_features * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        return _part(matrix, (Run(first, end - first),))

    def inner(self, matrix: WeightRef) -> WeightRef:
        """Some outputs of each projection of a matrix."""
        return self.by_outputs(matrix, *((size, size) for size in matrix.sizes))

    def output(self, output: OutputSpec) -> OutputSpec:
        """The same for the matrix behind a half of a block, whose results are summed."""
        return replace(output, matrix=self.by_inputs(output.matrix), is_partial=self.has_sums)

    def by_inputs(self, matrix: WeightRef) -> WeightRef:
        """The columns of a matrix for this rank's inputs; the first rank alone adds the bias."""
        num_inputs = matrix.in_features // self.num_ranks
        share = Share(matrix.sizes, (Run(0, matrix.out_features),), matrix.in_features, self.rank * num_inputs)
        has_bias = matrix.has_bias and self.rank == 0
        return replace(matrix, in_features=num_inputs, has_bias=has_bias, share=share)

    def by_outputs(self, matrix: WeightRef, *parts: tuple[int, int]) -> WeightRef:
        """See `runs`; the parts are all of the matrix."""
        assert sum(size for size, _ in parts) == matrix.out_features
        return _part(matrix, self.runs(*parts))

    def runs(self, *parts: tuple[int, int]) -> tuple[Run, ...]:
        """Where this rank's part of each of several parts lies, which follow each other: their sizes and heads."""
        start, runs = 0, []
        for size, num_heads in parts:
            own, each = self.run(num_heads), size // num_heads
            runs.append(Run(start + own.first * each, own.size * each))
            start += size
        return tuple(runs)

    def run(self, num_heads: int) -> Run:
        """The heads of this rank; where there are fewer than ranks, several have the same one."""
        return Run(self.rank * num_heads // self.num_ranks, max(num_heads // self.num_ranks, 1))

    def divides_heads(self, num_heads: int, num_shared: int) -> bool:
        """Whether a rank gets whole heads with all that they share."""
        return self.divides(num_heads) and not max(num_shared, self.num_ranks) % min(num_shared, self.num_ranks)

    def divides(self, *sizes: int) -> bool:
        """Whether all ranks get as much of each."""
        return not any(size % self.num_ranks for size in sizes)


def _part(matrix: WeightRef, runs: tuple[Run, ...]) -> WeightRef:
    """Runs of a matrix's outputs; where they are not parts of its projections, one by one, they count as one."""
    sizes = tuple(run.size for run in runs)
    sizes = sizes if len(sizes) == len(matrix.sizes) else (sum(sizes),)
    return replace(matrix, sizes=sizes, share=Share(matrix.sizes, runs, matrix.in_features))


def head_norm(norm: NormSpec, run: Run, over_all: bool = False) -> NormSpec:
    """Heads of which each has weights of its own are divided."""
    weight, bias = (
        ref and (rows(ref, run) if over_all or len(ref.shape) > 1 else ref) for ref in (norm.weight, norm.bias)
    )
    return replace(norm, weight=weight, bias=bias)


def rows(tensor: TensorRef, *runs: Run) -> TensorRef:
    """Runs of a tensor's first dimension."""
    shape = (sum(run.size for run in runs), *tensor.shape[1:])
    return replace(tensor, shape=shape, whole=tensor.shape[0], runs=runs)


def gated_delta(cut: Cut, mixer: GatedDeltaSpec) -> MixerSpec:
    """Linear attention by heads, with the keys that they share."""
    sizes = mixer.sizes
    if not cut.divides_heads(sizes.num_heads, sizes.num_key_heads):
        return mixer
    keys, values, heads = (
        (sizes.keys, sizes.num_key_heads),
        (sizes.values, sizes.num_heads),
        (sizes.num_heads, sizes.num_heads),
    )
    own, own_keys = cut.run(sizes.num_heads), cut.run(sizes.num_key_heads)
    sizes = replace(sizes, num_heads=own.size, num_key_heads=own_keys.size)
    qkv = (keys, keys, values)
    parts = ((*qkv, values, heads, heads),) if len(mixer.projections) == 1 else ((*qkv, values), (heads, heads))
    splits = (2 * sizes.keys + sizes.values, sizes.values), (own.size, own.size)
    pairs = zip(mixer.projections, parts, strict=True)
    return replace(
        mixer,
        projections=tuple(cut.by_outputs(matrix, *of_matrix) for matrix, of_matrix in pairs),
        splits=splits if len(parts) > 1 else ((*splits[0], *splits[1]),),
        convolution=_convolution(cut, mixer.convolution, *qkv),
        decay_log=rows(mixer.decay_log, own),
        decay_bias=rows(mixer.decay_bias, own),
        output=cut.output(mixer.output),
        sizes=sizes,
        state=_state(cut, mixer.state),
    )


def short_convolution(cut: Cut, mixer: ShortConvolutionSpec) -> MixerSpec:
    """By channels."""
    channels = mixer.convolution.cache.shape[0]
    if not cut.divides(channels):
        return mixer
    part = channels, channels
    return replace(
        mixer,
        inputs=cut.by_outputs(mixer.inputs, part, part, part),
        convolution=_convolution(cut, mixer.convolution, part),
        output=cut.output(mixer.output),
    )


def gated_recurrence(cut: Cut, mixer: GatedRecurrenceSpec) -> MixerSpec:
    """By the blocks of its gates."""
    (width,), num_blocks = mixer.state.shape, mixer.gate_weights[0].shape[0]
    if not cut.divides(num_blocks):
        return mixer
    part, blocks = (width, width), cut.run(num_blocks)
    return replace(
        mixer,
        inputs=cut.by_outputs(mixer.inputs, part, part),
        convolution=_convolution(cut, mixer.convolution, part),
        gate_weights=tuple(rows(gate, blocks) for gate in mixer.gate_weights),
        gate_biases=tuple(rows(gate, blocks) for gate in mixer.gate_biases),
        rate=rows(mixer.rate, cut.run(width)),
        output=cut.output(mixer.output),
        state=_state(cut, mixer.state),
    )


def mamba(cut: Cut, mixer: MambaSpec) -> MixerSpec:
    """By channels; the selection, which all of them make, is summed."""
    width = mixer.cache.shape[0]
    if not cut.divides(width):
        return mixer
    part, own = (width, width), cut.run(width)
    return replace(
        mixer,
        inputs=cut.by_outputs(mixer.inputs, part, part),
        convolution=_convolution(cut, mixer.convolution, part),
        selection=cut.by_inputs(mixer.selection),
        is_partial=cut.has_sums,
        times=cut.by_outputs(mixer.times, part),
        decays=rows(mixer.decays, own),
        skips=rows(mixer.skips, own),
        time_bias=rows(mixer.time_bias, own),
        output=cut.output(mixer.output),
        cache=_state(cut, mixer.cache),
    )


def mamba2(cut: Cut, mixer: Mamba2Spec) -> MixerSpec:
    """By heads, with the groups that they share; a norm is over all heads of a group, which is then not divided."""
    switches, num_heads, num_groups = mixer.switches, mixer.switches.num_heads, mixer.switches.num_groups
    if not cut.divides_heads(num_heads, num_groups) or (mixer.norm and not cut.divides(num_groups)):
        return mixer
    width, shared = (switches.width, num_heads), (num_groups * switches.state_size, num_groups)
    own = cut.run(num_heads)
    return replace(
        mixer,
        inputs=cut.by_outputs(mixer.inputs, width, width, shared, shared, (num_heads, num_heads)),
        convolution=_convolution(cut, mixer.convolution, width, shared, shared),
        decays=rows(mixer.decays, own),
        skips=rows(mixer.skips, own),
        time_bias=rows(mixer.time_bias, own),
        norm=mixer.norm and rows(mixer.norm, *cut.runs(width)),
        output=cut.output(mixer.output),
        switches=replace(switches, num_heads=own.size, num_groups=cut.run(num_groups).size),
        cache=_state(cut, mixer.cache),
    )


def _convolution(cut: Cut, convolution: ConvolutionSpec, *parts: tuple[int, int]) -> ConvolutionSpec:
    runs, (_, kernel) = cut.runs(*parts), convolution.cache.shape
    factors = [factor for _, factor in convolution.scales]
    return replace(
        convolution,
        weight=rows(convolution.weight, *runs),
        bias=convolution.bias and rows(convolution.bias, *runs),
        cache=replace(convolution.cache, shape=(sum(run.size for run in runs), kernel)),
        scales=tuple((run.size, factor) for run, factor in zip(runs, factors, strict=False)),
    )


def _state(cut: Cut, state: StateSpec) -> StateSpec:
    first, *others = state.shape
    return replace(state, shape=(first // cut.num_ranks, *others))


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the stages; by default the only one.

    Attributes:
        rank: Which of the ranks of the stage this process is.
        borders: First block of each stage, then the number of all blocks; empty if there is one stage.
    """

    index: int = 0
    rank: int = 0
    num_ranks: int = 1
    borders: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether it has embeddings, norm and head."""
        return not self.index

    @property
    def is_last(self) -> bool:
        """Whether it has the last blocks."""
        return self.index == max(len(self.borders) - 2, 0)

    def peer(self, index: int) -> int:
        """Number among all ranks of this rank's equal in a stage; negative indices count from the last."""
        return index % (len(self.borders) - 1) * self.num_ranks + self.rank

    def cut(self, spec: DecoderSpec) -> DecoderSpec:
        """The part of this stage; norm and embeddings of others are left out, a matrix that must be there is not."""
        if not self.borders:
            return spec
        blocks = spec.blocks[self.borders[self.index] : self.borders[self.index + 1]]
        if self.is_first:
            return replace(spec, blocks=blocks)
        return DecoderSpec(None, blocks, None, None)

    def unused(self, spec: DecoderSpec) -> tuple[str, ...]:
        """Beginnings of the names of what only other stages read."""
        own = set(_names(self.cut(spec).blocks))
        return tuple(name for name in _names(spec.blocks) if name not in own)

    def groups(self, spec: DecoderSpec) -> tuple[CacheGroup[CacheSpec], ...]:
        """The cache groups of the whole decoder, with the layers of this stage."""
        return group_layers(self.cut(spec).caches, spec.caches)


ONLY_STAGE = Stage()


def _names(blocks: Sequence[BlockSpec]) -> list[str]:
    names: list[str] = []
    for weight in (weight for block in blocks for weight in block.weights):
        match weight:
            case TensorRef():
                names.append(weight.name)
            case WeightRef():
                names += weight.names
            case ExpertsRef():
                names += [name.partition("{}")[0] for name in weight.matrix.names] + [weight.fused] * bool(weight.fused)
    return names


def find_stages(spec: DecoderSpec, num_stages: int, rank: int = 0, num_ranks: int = 1) -> tuple[Stage, ...]:
    """Cut a whole decoder so that the largest stage has as few weights as possible.

    Args:
        rank: Of this process in its stage.

    Raises:
        ModelError: It cannot be cut into so many stages.
    """
    if num_stages == 1:
        return (Stage(rank=rank, num_ranks=num_ranks),)
    if any(_reads_others(block) for block in spec.blocks):
        raise ModelError(
            f"pipeline_parallel_size {num_stages}: stages cannot divide layers that read keys, values or inputs of "
            "other layers"
        )
    if num_stages > len(spec.blocks):
        raise ModelError(
            f"pipeline_parallel_size must be at most {len(spec.blocks)}, the number of layers of the model, "
            f"got {num_stages}"
        )
    sizes = [sum(weight.num_values for weight in block.weights) for block in spec.blocks]
    borders = _borders(sizes, spec.num_parameters - sum(sizes), num_stages)
    return tuple(Stage(index, rank, num_ranks, borders) for index in range(num_stages))


def _reads_others(block: BlockSpec) -> bool:
    inner = block.block if isinstance(block, LayeredSpec) else block
    return isinstance(block, LayerInputsSpec) or isinstance(getattr(inner, "mixer", None), ReadingSpec)


def _borders(sizes: Sequence[int], extra: int, num_stages: int) -> tuple[int, ...]:
    """First block of each stage, and the end; extra counts for the first stage. The best cuts of ever more blocks."""
    sums = [0, *accumulate(sizes)]
    num_blocks = len(sizes)
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        end: (sums[end] + extra, (0, end)) for end in range(1, num_blocks + 1)
    }
    for stage in range(2, num_stages + 1):
        best = {
            end: min(
                (max(best[first][0], sums[end] - sums[first]), (*best[first][1], end))
                for first in range(stage - 1, end)
            )
            for end in range(stage, num_blocks + 1)
        }
    return best[num_blocks][1]


def largest_groups(spec: DecoderSpec, stages: Sequence[Stage]) -> tuple[CacheGroup[CacheSpec], ...]:
    """Of each cache group the part of the stage that has most layers of it, by which memory is planned."""
    by_stage = zip(*(stage.groups(spec) for stage in stages), strict=True)
    return tuple(max(parts, key=lambda group: len(group.layers)) for parts in by_stage)
