"""Cuts the description of a decoder for its processes: heads and channels for ranks, blocks for pipeline stages.

A rank has some heads of every mixer and some inner values of every feed-forward layer and expert: the matrices before
them are divided by outputs, those behind them by inputs. What the ranks make is summed, once in each half of a block,
before it is added to the hidden states (Shoeybi et al., 2019, section 3). Ranks share K/V heads, and what else heads
share, where there are fewer than ranks. A latent cache is whole on every rank. Embedding and output head are divided by
the ids of the vocabulary. What cannot be divided, such as norms and routers, is whole on every rank, which then makes
all of it alone. Each part knows how it is cut (`PartSpec.cut`).

`find_stages` divides the blocks: each stage has some neighbouring ones and their caches. The first stage also has the
embeddings, the final norm and the output head. All processes find the same borders.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from weft.engine.cache.specs import CacheGroup, CacheSpec, group_layers
from weft.engine.describe.cut import Cut
from weft.engine.describe.specs import BlockSpec, DecoderSpec
from weft.engine.parts.attention import ReadingSpec
from weft.engine.parts.layer_inputs import LayerInputsSpec
from weft.engine.weights.reader import ExpertsRef, TensorRef, WeightRef
from weft.engine.wire.errors import ModelError


def shard(spec: DecoderSpec, rank: int, num_ranks: int, *, has_sums: bool = True) -> DecoderSpec:
    """What a rank computes of a decoder.

    Args:
        has_sums: False leaves out what ranks exchange inside blocks, so that one can be tried alone.
    """
    return spec if num_ranks == 1 else spec.cut(Cut(rank, num_ranks, has_sums))


def whole_parts(spec: DecoderSpec, part: DecoderSpec) -> Counter[str]:
    """The kinds of mixers and feed-forward layers that are whole on every rank, and in how many blocks."""
    return Counter(
        type(half).__name__.removesuffix("Spec")
        for block, own in zip(spec.blocks, part.blocks, strict=True)
        for name, half in block.halves.items()
        if half == own.halves[name]
    )


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
    if spec.encoder is not None or any(_reads_others(block) for block in spec.blocks):
        raise ModelError(
            f"pipeline_parallel_size {num_stages}: stages cannot divide layers that read keys, values or inputs of "
            "other layers, or an encoder"
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
    return isinstance(block, LayerInputsSpec) or isinstance(block.halves.get("mixer"), ReadingSpec)


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
