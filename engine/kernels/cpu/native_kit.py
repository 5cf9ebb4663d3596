"""Weft's own kernels as a kit of layers, for bfloat16 on the CPU.

Matrices may be int8, everything else stays bfloat16. A row's outputs do not depend, bit for bit, on the other rows of a
step. A packed matrix is the only copy of its weights: the embedding reads its rows from the output head when the two
are tied.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from weft.engine.kernels.cpu.layers import NativeHeads, NativeLinear, NativeNorm
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.packed import PANEL, TILE
from weft.engine.kernels.cpu.run import fuse
from weft.engine.layers.block import Block
from weft.engine.layers.gated import TorchGated
from weft.engine.layers.norm import HeadNorm, RMSNorm
from weft.engine.layers.parts import HeadLayer, Layer, Linear
from weft.engine.models.config import ModelConfig
from weft.engine.weights.reader import WeightReader
from weft.engine.weights.refs import WeightRef


def supports(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels can compute this model."""
    sizes_fit = config.hidden_size % PANEL == 0 and config.head_dim % TILE == 0 and config.intermediate_size % 2 == 0
    return device.type == "cpu" and dtype == torch.bfloat16 and sizes_fit


class NativeKit:
    """Weft's kernels; see `LayerKit`."""

    def __init__(self, library: NativeLibrary, is_int8: bool = False) -> None:
        """Take the functions of a loaded library; is_int8 quantizes every matrix."""
        self.name = f"native{' int8' if is_int8 else ''} ({library.variant})"
        self._is_int8 = is_int8
        self._library = library

    def linear_bytes(self, ref: WeightRef, dtype: torch.dtype) -> int:
        """See `LayerKit`; in int8 every output has a scale in float32."""
        if not self._is_int8:
            return ref.num_values * dtype.itemsize
        return ref.out_features * (ref.in_features + torch.float32.itemsize + ref.has_bias * dtype.itemsize)

    def tied_bytes(self, ref: WeightRef, dtype: torch.dtype) -> int:
        """See `LayerKit`."""
        return self.linear_bytes(ref, dtype)

    def linear(self, ref: WeightRef, reader: WeightReader) -> NativeLinear:
        """See `LayerKit`."""
        return NativeLinear(self._library, *reader.dense(ref), is_int8=self._is_int8)

    def gated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        """See `LayerKit`."""
        if activation != "silu" or ref.has_bias:  # rare enough to do without a kernel of its own
            return TorchGated(self.linear(ref, reader), activation)
        return NativeLinear(self._library, *reader.dense(ref), is_gated=True, is_int8=self._is_int8)

    def embedding(self, ref: WeightRef, reader: WeightReader) -> Layer:
        """See `LayerKit`."""
        return partial(F.embedding, weight=reader.dense(ref)[0])

    def tied(self, ref: WeightRef, reader: WeightReader) -> tuple[Layer, Linear]:
        """See `LayerKit`."""
        head = self.linear(ref, reader)
        return head.gather, head

    def norm(self, weight: torch.Tensor, eps: float) -> Layer:
        """See `LayerKit`."""
        if weight.dtype != torch.bfloat16:
            return RMSNorm(weight, eps)
        return NativeNorm(self._library, weight, eps)

    def heads(self, norm: HeadNorm | None, num_heads: int, num_kv_heads: int) -> HeadLayer:
        """See `LayerKit`."""
        return NativeHeads(self._library, norm, num_heads, num_kv_heads)

    def fuse(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """See `LayerKit`."""
        return fuse(self._library, blocks)
