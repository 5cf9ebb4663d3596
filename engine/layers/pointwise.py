"""Functions of each value by itself. On the CPU torch's own round otherwise in vectors than in what is left over.

There a result would depend on where its value lies, and so on the other rows of a step. `exp` and `log1p` have no such
fault.
"""

import torch
import torch.nn.functional as F


def sigmoid(values: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-values))."""
    return values.sigmoid() if values.is_cuda else values.neg().exp_().add_(1).reciprocal_()


def softplus(values: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(values)), which is values above 20."""
    return F.softplus(values) if values.is_cuda else torch.where(values > 20, values, values.exp().log1p_())
