"""Cuts the matrices and vectors of one part of a decoder for a rank; see `sharding.py`."""

from dataclasses import dataclass, replace

from weft.engine.describe.specs import NormSpec, OutputSpec
from weft.engine.weights.refs import Run, Share, TensorRef, WeightRef


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
