"""Divides the description of a decoder among pipeline stages: each has some neighbouring blocks and their caches.

The first stage also has the embeddings, the final norm and the output head. All processes find the same borders.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from weft.engine.cache.specs import CacheGroup, CacheSpec, group_layers
from weft.engine.describe.specs import BlockSpec, DecoderSpec
from weft.engine.models.layer_inputs import LayeredSpec, LayerInputsSpec
from weft.engine.models.shared_attention import ReadingSpec
from weft.engine.shared.errors import ModelError
from weft.engine.weights.refs import ExpertsRef, TensorRef, WeightRef


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


def largest_groups(spec: DecoderSpec, stages: Sequence[Stage]) -> tuple[CacheGroup[CacheSpec], ...]:
    """Of each cache group the part of the stage that has most layers of it, by which memory is planned."""
    by_stage = zip(*(stage.groups(spec) for stage in stages), strict=True)
    return tuple(max(parts, key=lambda group: len(group.layers)) for parts in by_stage)


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
