"""What a model reads of a checkpoint, by name and shape.

A reference says what is needed, not how a checkpoint keeps it: that is the reader's business. Nor does it say what
becomes of it in memory: that is the kit's.
"""

import enum
from dataclasses import dataclass

import torch


class Split(enum.Enum):
    """How ranks divide a matrix between them.

    COLUMN gives each rank some outputs of every stacked projection. ROW gives each some inputs, and the ranks' outputs
    are summed. NONE gives every rank the whole.
    """

    NONE = "none"
    COLUMN = "column"
    ROW = "row"


@dataclass(frozen=True, slots=True)
class WeightRef:
    """A matrix: one projection, or several that share their input, stacked along the outputs.

    Attributes:
        names: Of the projections in the checkpoint, without `.weight` and `.bias`.
        sizes: Outputs of each projection.
        in_features: Inputs of all of them.
        has_bias: Whether they have a bias.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    in_features: int
    has_bias: bool = False
    split: Split = Split.NONE

    @property
    def out_features(self) -> int:
        """Outputs of all projections together."""
        return sum(self.sizes)

    @property
    def num_values(self) -> int:
        """Values in the checkpoint."""
        return self.out_features * (self.in_features + self.has_bias)


@dataclass(frozen=True, slots=True)
class VectorRef:
    """The weights of a norm.

    Attributes:
        offset: What the checkpoint leaves out of them.
    """

    name: str
    size: int
    offset: float = 0.0

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes in memory: near 1, a 16-bit type keeps fewer digits of a weight than near 0, so a sum is float32."""
        return self.size * (torch.float32 if self.offset else dtype).itemsize
