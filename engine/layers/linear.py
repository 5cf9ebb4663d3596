"""Linear layers, and how they are applied.

A `Linear` of a model is a weight and a kernel that applies it. The kernel is exchanged from outside the model code:
packing for the CPU does so here, quantization and sharding can do the same. The weight belongs to the kernel alone,
so exchanging it frees the old layout.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F


class LinearKernel(Protocol):
    """Owns a weight in some layout and applies it."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features), same dtype."""
        ...


class PlainKernel:
    """torch's own linear, on any device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take weight (out_features, in_features) and bias (out_features,), None if there is none."""
        self.weight = weight
        self.bias = bias

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply the weight."""
        return F.linear(inputs, self.weight, self.bias)


class OnednnKernel:
    """A weight in oneDNN's blocked layout, which streams from memory almost twice as fast for a few rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Copy a bfloat16 weight (out_features, in_features) into the blocked layout."""
        self.weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = bias

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply the weight."""
        outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return outputs


class Linear:
    """A matrix of the model, possibly several that share their input, stacked along the outputs."""

    __slots__ = ("kernel",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Start with the plain kernel; shapes as there."""
        self.kernel: LinearKernel = PlainKernel(weight, bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""
        return self.kernel(inputs)


LinearPacker = Callable[[Linear], None]
"""Exchanges the kernel of a freshly loaded linear layer."""


def keep_plain(linear: Linear) -> None:
    """Leave the layer as it is."""


def pack_onednn(linear: Linear) -> None:
    """Move a plain layer to oneDNN's layout and free the plain weight."""
    plain = linear.kernel
    assert isinstance(plain, PlainKernel)
    linear.kernel = OnednnKernel(plain.weight, plain.bias)


def choose_packer(device: torch.device, dtype: torch.dtype) -> LinearPacker:
    """The fastest layout by measurement: oneDNN's for bfloat16 on a CPU that has bfloat16 instructions, else plain."""
    if device.type == "cpu" and dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        has_bfloat16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if has_bfloat16:
            return pack_onednn
    return keep_plain
