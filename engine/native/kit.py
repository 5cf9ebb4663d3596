"""Weft's own kernels as a kit of layers, for bfloat16 on the CPU.

Matrices may be int8, everything else stays bfloat16. A row's outputs do not depend, bit for bit, on the other rows of a
step. A packed matrix is the only copy of its weights: the embedding reads its rows from the output head when the two
are tied.
"""

from collections.abc import Sequence

import torch

from engine.layers.gated import TorchGated
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.stack import DecoderLayer, HeadLayer, Layer, LayerStack, Linear
from engine.models.config import ModelConfig
from engine.native.layers import NativeHeads, NativeLinear, NativeNorm
from engine.native.library import NativeLibrary
from engine.native.packed import PANEL, TILE
from engine.native.stack import make_stack


def supports(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels can compute this model."""
    sizes_fit = config.hidden_size % PANEL == 0 and config.head_dim % TILE == 0 and config.intermediate_size % 2 == 0
    return device.type == "cpu" and dtype == torch.bfloat16 and sizes_fit


class NativeKit:
    """Weft's kernels; see `LayerKit`."""

    copies_tied_table = False

    def __init__(self, library: NativeLibrary, is_int8: bool = False) -> None:
        """Take the functions of a loaded library; is_int8 quantizes every matrix."""
        self.name = f"native{' int8' if is_int8 else ''} ({library.variant})"
        self.is_int8 = is_int8
        self._library = library

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """See `LayerKit`."""
        return NativeLinear(self._library, weight, bias, is_int8=self.is_int8)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> Layer:
        """See `LayerKit`."""
        if activation != "silu" or bias is not None:  # rare enough to do without a kernel of its own
            return TorchGated(self.linear(weight, bias), activation)
        return NativeLinear(self._library, weight, None, is_gated=True, is_int8=self.is_int8)

    def tied(self, table: torch.Tensor) -> tuple[Layer, Linear]:
        """See `LayerKit`."""
        head = NativeLinear(self._library, table, None, is_int8=self.is_int8)
        return head.gather, head

    def norm(self, weight: torch.Tensor, eps: float) -> Layer:
        """See `LayerKit`."""
        if weight.dtype != torch.bfloat16:
            return RMSNorm(weight, eps)
        return NativeNorm(self._library, weight, eps)

    def heads(self, norm: HeadNorm | None, num_heads: int, num_kv_heads: int) -> HeadLayer:
        """See `LayerKit`."""
        return NativeHeads(self._library, norm, num_heads, num_kv_heads)

    def stack(self, layers: Sequence[DecoderLayer], head_dim: int) -> LayerStack:
        """See `LayerKit`."""
        return make_stack(self._library, layers, head_dim)
