"""References to the weights of a checkpoint, by name and shape.

A reference does not say how the checkpoint stores a weight, which the reader knows, nor how it is kept in memory, which
the kit decides.
"""

import enum
from dataclasses import dataclass

import torch


class Split(enum.Enum):
    """How ranks divide a matrix.

    COLUMN: each rank has some outputs of every stacked projection. ROW: each rank has some inputs, and the ranks'
    outputs are summed. NONE: every rank has the whole matrix.
    """

    NONE = "none"
    COLUMN = "column"
    ROW = "row"


@dataclass(frozen=True, slots=True)
class WeightRef:
    """A matrix: one projection, or several that share their input, stacked along the outputs.

    Attributes:
        names: Names of the projections in the checkpoint, without `.weight` and `.bias`.
        sizes: Outputs of each projection.
        in_features: Inputs, the same for all.
        has_bias: Whether each projection has a bias.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    in_features: int
    has_bias: bool = False
    split: Split = Split.NONE

    @property
    def out_features(self) -> int:
        """Outputs of all projections."""
        return sum(self.sizes)

    @property
    def num_values(self) -> int:
        """Values in the checkpoint."""
        return self.out_features * (self.in_features + self.has_bias)


@dataclass(frozen=True, slots=True)
class VectorRef:
    """The weights of a norm.

    Attributes:
        name: Name in the checkpoint, without `.weight`.
        offset: Added to the stored values.
    """

    name: str
    size: int
    offset: float = 0.0

    @property
    def num_values(self) -> int:
        """Values in the checkpoint."""
        return self.size

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes in memory; with an offset float32, because 16-bit types are less precise near 1 than near 0."""
        return self.size * (torch.float32 if self.offset else dtype).itemsize
