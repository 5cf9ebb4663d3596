"""References to the weights of a checkpoint, by name and shape.

A reference does not say how the checkpoint stores a weight, which the reader knows, nor how it is kept in memory, which
the kit decides.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Where a checkpoint has the rows of a matrix, or the values of a vector, that a model wants in another order.

    The checkpoint has num_groups groups, and in each of them the parts one after another. The model wants the first
    part of all groups, then the rows behind the groups, then the second part of all groups, and so on. Then rows within
    heads are put in order.

    Attributes:
        num_groups: Such as the heads of a fused projection; 1 if all is in place.
        parts: Rows of each part of a group; empty for one part.
        head: For each row of a head, the place that it has in the checkpoint; empty if heads are in order.
        num_heads: Heads at the beginning that `head` is for.
    """

    num_groups: int = 1
    parts: tuple[int, ...] = ()
    head: tuple[int, ...] = ()
    num_heads: int = 0

    def indices(self, num_rows: int) -> torch.Tensor:
        """(num_rows,) int64: for each row of the model, the row of the checkpoint."""
        rows = torch.arange(num_rows)
        if self.parts:
            grouped, others = rows.tensor_split((self.num_groups * sum(self.parts),))
            parts = torch.split(grouped.view(self.num_groups, sum(self.parts)), list(self.parts), 1)
            first, *more = (part.flatten() for part in parts)
            rows = torch.cat((first, others, *more))
        if self.head:
            num_ordered = self.num_heads * len(self.head)
            heads = rows[:num_ordered].view(self.num_heads, len(self.head))
            rows = torch.cat((heads[:, torch.tensor(self.head)].flatten(), rows[num_ordered:]))
        return rows


class Run(NamedTuple):
    """Neighbouring rows, from the first on."""

    first: int
    size: int


@dataclass(frozen=True, slots=True)
class Share:
    """Where a rank's part of a matrix lies in the whole, which the checkpoint has.

    Attributes:
        sizes: Outputs of each projection of the whole.
        runs: Outputs of the part, among those of the whole in the model's order.
        in_features: Inputs of the whole.
        first_input: The first input of the part.
    """

    sizes: tuple[int, ...]
    runs: tuple[Run, ...]
    in_features: int
    first_input: int = 0


@dataclass(frozen=True, slots=True)
class WeightRef:
    """A matrix: one projection, or several that share their input, stacked along the outputs.

    Attributes:
        names: Names of the projections in the checkpoint, without `.weight` and `.bias`; one if it has them stacked.
        sizes: Outputs of each projection.
        in_features: Inputs, the same for all.
        has_bias: Whether each projection has a bias.
        order: Where the checkpoint has the rows of the stacked matrix, the whole one; None if they are in order.
        is_transposed: Whether the checkpoint has (in_features, out_features).
        scales: Factors on the outputs of each projection, folded into weights and biases; empty for 1.
        share: Of which whole matrix this is a part; None if it is a whole one.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    in_features: int
    has_bias: bool = False
    order: RowOrder | None = None
    is_transposed: bool = False
    scales: tuple[float, ...] = ()
    share: Share | None = None

    @property
    def out_features(self) -> int:
        """Outputs of all projections."""
        return sum(self.sizes)

    @property
    def num_values(self) -> int:
        """Values in the checkpoint."""
        return self.out_features * (self.in_features + self.has_bias)

    @property
    def is_cut(self) -> bool:
        """Whether its inputs are some of those of a whole matrix."""
        return self.share is not None and self.share.in_features != self.in_features

    def stored_rows(self, share: Share) -> torch.Tensor:
        """(out_features,) int64: for each output of a part, its row in the checkpoint's stacked matrix."""
        rows = torch.cat([torch.arange(first, first + size) for first, size in share.runs])
        return rows if self.order is None else self.order.indices(sum(share.sizes))[rows]


@dataclass(frozen=True, slots=True)
class ExpertsRef:
    """A matrix of each expert of a layer.

    Attributes:
        matrix: That of one expert. In its names `{}` stands for the expert's number. Without it a tensor of the
            checkpoint holds all experts, along its first dimension.
        suffixes: What follows a name in the name of a weight and in that of a bias.
        fused: A tensor that holds all experts in newer checkpoints, gate before up; "" if there is none.
    """

    matrix: WeightRef
    num_experts: int
    suffixes: tuple[str, str] = (".weight", ".bias")
    fused: str = ""

    @property
    def num_values(self) -> int:
        """Values in the checkpoint."""
        return self.num_experts * self.matrix.num_values


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A small tensor that no product reads as a matrix, such as the weights of a norm.

    Attributes:
        name: Full name in the checkpoint.
        offset: Added to the stored values, which are then kept in float32: 16-bit types are less precise near 1.
        dtype: Dtype in memory; None for the model's.
        order: Where the checkpoint has the values, flattened, of the whole tensor; None if they are in order.
        whole: Length in the checkpoint, if this is a part along the first dimension, namely the rows of the runs.
    """

    name: str
    shape: tuple[int, ...]
    offset: float = 0.0
    dtype: torch.dtype | None = None
    order: RowOrder | None = None
    whole: int | None = None
    runs: tuple[Run, ...] = ()

    @property
    def num_values(self) -> int:
        """Values in the checkpoint."""
        return prod(self.shape)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes in memory for a model of this dtype."""
        return self.num_values * (torch.float32 if self.offset else self.dtype or dtype).itemsize
