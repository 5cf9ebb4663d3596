"""A matrix in the kernels' layout, and the two kernels that read it; see `linear.c` and `linear_int8.c`.

Packed once; the plain weight is not kept. In int8 every output has a scale of its own, its largest weight over 127.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.memory import allocate

PANEL, TILE = 16, 32
"""Outputs in a panel of packed weights, and what the inputs are padded to."""

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix, or equal parts of a gated one, in memory that belongs to this object.

    Attributes:
        multiply, gather: The kernels, which both take `pointers` where the C functions take the matrix.
        pointers: Of `tensors`: the weights, and their scales in int8.
    """

    multiply: Callable[..., None]
    gather: Callable[..., None]
    tensors: tuple[torch.Tensor, ...]
    pointers: tuple[int, ...]


def pack_bf16(library: NativeLibrary, parts: Sequence[torch.Tensor]) -> PackedMatrix:
    """Pack parts (out_features, in_features) of bfloat16, one behind the other."""
    packed = _allocate(parts, torch.bfloat16)
    pack = library.function("weft_pack_linear", _POINTER, _SIZE, _SIZE, _POINTER)
    for part, target in zip(parts, packed, strict=True):
        plain = part.contiguous()
        pack(plain.data_ptr(), *plain.shape, target.data_ptr())
    return _packed(library, "", packed)


def pack_int8(library: NativeLibrary, parts: Sequence[torch.Tensor]) -> PackedMatrix:
    """Quantize parts (out_features, in_features) of bfloat16, and pack them one behind the other."""
    packed = _allocate(parts, torch.int8)
    scales = torch.zeros(len(parts), -(-len(parts[0]) // PANEL) * PANEL)
    pack = library.function("weft_pack_linear_int8", _POINTER, _SIZE, _SIZE, _POINTER, _POINTER)
    for part, target, target_scales in zip(parts, packed, scales, strict=True):
        plain = part.contiguous()
        pack(plain.data_ptr(), *plain.shape, target.data_ptr(), target_scales.data_ptr())
    return _packed(library, "_int8", packed, scales)


def _allocate(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Zeros for all parts, (num_parts, values of one when padded)."""
    out_features, in_features = parts[0].shape
    num_values = -(-out_features // PANEL) * PANEL * (-(-in_features // TILE) * TILE)
    return allocate(len(parts) * num_values, dtype).view(len(parts), num_values)


def _packed(library: NativeLibrary, suffix: str, *tensors: torch.Tensor) -> PackedMatrix:
    matrix = (_POINTER,) * len(tensors)
    epilogue = (_SIZE, _POINTER, _POINTER, _SIZE, _SIZE)
    multiply = library.function(f"weft_linear{suffix}", _POINTER, _SIZE, _SIZE, _SIZE, *matrix, *epilogue)
    gather = library.function(f"weft_gather_rows{suffix}", *matrix, _SIZE, _POINTER, _SIZE, _POINTER)
    return PackedMatrix(multiply, gather, tensors, tuple(tensor.data_ptr() for tensor in tensors))
