"""The hidden states that a step gives to requests for vectors."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PoolBatch:
    """Tokens whose final hidden states are wanted, as sums over runs of them.

    Attributes:
        token_indices: (n,) flat token indices, run after run.
        lengths: (num_runs,) how many tokens each run has, at least one.
    """

    token_indices: Ints
    lengths: Ints
