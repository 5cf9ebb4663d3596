"""Packs a matrix for the native kernels; linear.c and linear_int8.c describe the layouts.

The plain weight is not kept. In int8 every output has a scale: its largest magnitude / 127.
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.memory import allocate

# Outputs in a panel of packed weights; inputs are padded to a multiple of the second number.
PANEL, TILE = 16, 32

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class Matrix(ctypes.Structure):
    """`Matrix` of kernels.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("weights", "scales", "bias")),
        *((name, _SIZE) for name in ("inputs", "outputs")),
    )


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix, the two halves of a gated one, or those of all experts of a layer; owns the memory.

    Attributes:
        multiply, gather: The kernels; both take `pointers` in place of the matrix.
        pointers: Addresses of `tensors`: the weights, then for int8 their scales.
    """

    multiply: Callable[..., None]
    gather: Callable[..., None]
    tensors: tuple[torch.Tensor, ...]
    pointers: tuple[int, ...]

    def described(self, bias_pointer: int | None, shape: tuple[int, int]) -> Matrix:
        """The matrix as C sees it; shape: outputs and inputs of a part."""
        weights, *scales = self.pointers
        return Matrix(weights, *(scales or (None,)), bias_pointer, shape[1], shape[0])


def pack(
    library: NativeLibrary, parts: Iterable[torch.Tensor], num_parts: int, shape: tuple[int, int], *, is_int8: bool
) -> PackedMatrix:
    """Pack num_parts parts of this shape, (out_features, in_features), one after another; is_int8 quantizes them."""
    out_features, in_features = shape
    padded = -(-out_features // PANEL) * PANEL
    num_values = padded * (-(-in_features // TILE) * TILE)
    weights = allocate(num_parts * num_values, torch.int8 if is_int8 else torch.bfloat16)
    tensors: tuple[torch.Tensor, ...] = (weights.view(num_parts, num_values),)
    if is_int8:
        tensors += (torch.zeros(num_parts, padded),)
    suffix, matrix = "_int8" if is_int8 else "", (_POINTER,) * len(tensors)
    pack_part = library.function(f"weft_pack_linear{suffix}", _POINTER, _SIZE, _SIZE, *matrix)
    for part, *targets in zip(parts, *tensors, strict=True):
        plain = part.contiguous()
        pack_part(plain.data_ptr(), *plain.shape, *(target.data_ptr() for target in targets))
    epilogue = (_SIZE, _POINTER, _POINTER, _SIZE, _SIZE)
    multiply = library.function(f"weft_linear{suffix}", _POINTER, _SIZE, _SIZE, _SIZE, *matrix, *epilogue)
    gather = library.function(f"weft_gather_rows{suffix}", *matrix, _SIZE, _POINTER, _SIZE, _POINTER)
    return PackedMatrix(multiply, gather, tensors, tuple(tensor.data_ptr() for tensor in tensors))
