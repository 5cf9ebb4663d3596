"""Matrices that keep their inputs in another order than the model: that of the groups which share scales.

GPTQ's `desc_act` (arXiv:2210.17323) quantizes the inputs that matter most first, so that a group is of inputs from
anywhere (`g_idx`). Side by side, they are groups as kernels take them.
"""

from typing import cast

import torch
from typing_extensions import override

from weft.engine.layers.gated import Activated
from weft.engine.layers.parts import Linear


class OrderedLinear(Linear):
    """A matrix; `order`, (in_features,) int64, has for each of its inputs the one of the model.

    It is also `Activated` where the inner one is.
    """

    def __init__(self, inner: Linear, order: torch.Tensor) -> None:
        """Take the matrix in its own order."""
        self.inner, self.order = inner, order

    @override
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs.index_select(1, self.order))

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        self.inner.add_to(residual, inputs.index_select(1, self.order))

    @override
    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner.to_float32(inputs.index_select(1, self.order))

    def sums(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `Activated`."""
        return cast(Activated, self.inner).sums(inputs.index_select(1, self.order))

    def activate(self, sums: torch.Tensor) -> torch.Tensor:
        """See `Activated`."""
        return cast(Activated, self.inner).activate(sums)
