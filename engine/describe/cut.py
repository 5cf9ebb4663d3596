"""What a rank gets of a matrix, a vector or a state: some heads, channels or ids, see `PartSpec.cut`."""

from dataclasses import dataclass, replace

from weft.engine.cache.specs import CacheSpec, StateSpec
from weft.engine.weights.reader import Run, Share, TensorRef, WeightRef


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank gets.

    Attributes:
        has_sums: Whether what the ranks make is summed.
        caches: Those of the whole decoder, for parts that read another's.
    """

    rank: int
    num_ranks: int
    has_sums: bool
    caches: tuple[CacheSpec, ...] = ()

    def vocabulary(self, matrix: WeightRef) -> WeightRef:
        """The rows of this rank's ids, whose number need not divide evenly."""
        first, end = (matrix.out_features * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        return _part(matrix, (Run(first, end - first),))

    def inner(self, matrix: WeightRef) -> WeightRef:
        """Some outputs of each projection of a matrix."""
        return self.by_outputs(matrix, *((size, size) for size in matrix.sizes))

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

    def state(self, state: StateSpec) -> StateSpec:
        """This rank's part of the first dimension."""
        first, *others = state.shape
        return replace(state, shape=(first // self.num_ranks, *others))

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


def rows(tensor: TensorRef, *runs: Run) -> TensorRef:
    """Runs of a tensor's first dimension."""
    shape = (sum(run.size for run in runs), *tensor.shape[1:])
    return replace(tensor, shape=shape, whole=tensor.shape[0], runs=runs)
