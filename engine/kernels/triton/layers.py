"""Layers without a matrix, each one launch: norm, and activation of a gated feed-forward layer."""

import torch
import triton

from weft.engine.kernels.triton import layer_kernels as kernels
from weft.engine.kernels.triton.dependent_launch import launch_options

_ACTIVATION_BLOCK = 1024

OWN_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""Those that the kernels know."""


class TritonNorm:
    """RMSNorm of rows."""

    def __init__(self, weight: torch.Tensor, eps: float, is_dependent: bool) -> None:
        """Take weight (size,), in the dtype of the hidden states or float32; see `dependent_launch`."""
        self.weight = weight
        self.eps = eps
        self._block = triton.next_power_of_2(len(weight))
        self._num_warps = min(max(self._block // 512, 1), 16)
        self._options = launch_options(is_dependent)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_rows, size) -> the same shape and dtype."""
        num_rows, size = hidden.shape
        outputs = hidden.new_empty(num_rows, size)
        kernels.rms_norm[(num_rows,)](
            *(hidden, self.weight, outputs, size, hidden.stride(0), self.eps, self._block),
            num_warps=self._num_warps,
            **self._options,
        )
        return outputs


class GatedActivation:
    """activation(gate) * up."""

    def __init__(self, activation: str, is_dependent: bool) -> None:
        """Take one of `OWN_ACTIVATIONS`; see `dependent_launch`."""
        self.name = activation
        self._options = launch_options(is_dependent)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """(num_rows, 2 * size), gate first -> (num_rows, size)."""
        num_rows, size = values.size(0), values.size(1) // 2
        outputs = values.new_empty(num_rows, size)
        grid = (num_rows, triton.cdiv(size, _ACTIVATION_BLOCK))
        kernels.activate[grid](values, outputs, size, self.name, _ACTIVATION_BLOCK, num_warps=4, **self._options)
        return outputs
