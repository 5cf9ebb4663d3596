"""Packs a matrix for the native kernels; linear.c and grouped_layout.h describe the layouts.

The plain weight is not kept. In a form of groups, every 16 or 32 inputs of an output share a scale and, in some forms,
an offset.
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from weft.engine.kernels.cpu.grouped import Form, GroupedRows, round_rows
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.memory import allocate

# Outputs in a panel of packed weights; inputs are padded to a multiple of the second number.
PANEL, TILE = 16, 32

Storage = Literal["bfloat16"] | Form
"""How a matrix is kept."""

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class Matrix(ctypes.Structure):
    """`Matrix` of kernels.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("weights", "scales", "bias")),
        *((name, _SIZE) for name in ("inputs", "outputs", "form")),
    )


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix, the two halves of a gated one, or those of all experts of a layer; owns the memory.

    Attributes:
        multiply, gather: The kernels; both take `arguments` in place of the matrix.
        tensors: The weights, then, in groups, the factors of outputs.
        form: The code of a form of groups, else 0.
    """

    multiply: Callable[..., None]
    gather: Callable[..., None]
    tensors: tuple[torch.Tensor, ...]
    form: int

    @property
    def arguments(self) -> tuple[int, ...]:
        """Addresses of the tensors, and the form of groups."""
        return *(tensor.data_ptr() for tensor in self.tensors), *((self.form,) if self.form else ())

    def part(self, index: int) -> tuple[int, ...]:
        """`arguments` of one of several parts."""
        return *(tensor[index].data_ptr() for tensor in self.tensors), *((self.form,) if self.form else ())

    def described(self, bias_pointer: int | None, shape: tuple[int, int]) -> Matrix:
        """The matrix as C sees it; shape: outputs and inputs of a part."""
        weights, *scales = (tensor.data_ptr() for tensor in self.tensors)
        return Matrix(weights, *(scales or (None,)), bias_pointer, shape[1], shape[0], self.form)


def pack(
    library: NativeLibrary,
    parts: Iterable[torch.Tensor | GroupedRows],
    num_parts: int,
    shape: tuple[int, int],
    storage: Storage,
    *,
    is_beside_steps: bool = False,
) -> PackedMatrix:
    """Pack num_parts parts of this shape, (out_features, in_features), one after another.

    Plain parts are rounded to what the storage says; parts in groups have its form.

    Args:
        is_beside_steps: Whether another thread may run steps: plain bfloat16 is then packed by torch, since native
            functions take calls from one thread at a time.
    """
    out_features, in_features = shape
    padded = -(-out_features // PANEL) * PANEL
    form = storage if isinstance(storage, Form) else None
    num_values = padded * (form.row_bytes(in_features) if form else -(-in_features // TILE) * TILE)
    weights = allocate(num_parts * num_values, torch.uint8 if form else torch.bfloat16)
    tensors: tuple[torch.Tensor, ...] = (weights.view(num_parts, num_values),)
    if form:
        tensors += (torch.zeros(num_parts, padded),)
    suffix = "_grouped" if form else ""
    matrix = *(_POINTER for _ in tensors), *((_SIZE,) if form else ())
    pack_plain = library.function("weft_pack_linear", _POINTER, _SIZE, _SIZE, _POINTER)
    for part, *targets in zip(parts, *tensors, strict=True):
        if form:
            rows = part if isinstance(part, GroupedRows) else round_rows(library, part, form)
            rows.pack(library, form, *targets)
        else:
            assert isinstance(part, torch.Tensor)
            plain = part.contiguous()
            if is_beside_steps:
                pairs = panels(plain, TILE)
                targets[0].view(pairs.shape).copy_(pairs)
            else:
                pack_plain(plain.data_ptr(), *plain.shape, targets[0].data_ptr())
    epilogue = (_SIZE, _POINTER, _POINTER, _SIZE, _SIZE)
    multiply = library.function(f"weft_linear{suffix}", _POINTER, _SIZE, _SIZE, _SIZE, *matrix, *epilogue)
    gather = library.function(f"weft_gather_rows{suffix}", *matrix, _SIZE, _POINTER, _SIZE, _POINTER)
    return PackedMatrix(multiply, gather, tensors, form.code if form else 0)


def panels(matrix: torch.Tensor, multiple: int) -> torch.Tensor:
    """A matrix (out_features, in_features) in panels of pairs of inputs, which are padded to a multiple.

    Returns:
        (num_panels, num_pairs, PANEL, 2)
    """
    num_outputs, num_inputs = matrix.shape
    padded = F.pad(matrix, (0, -num_inputs % multiple, 0, -num_outputs % PANEL))
    return padded.view(-1, PANEL, padded.size(1) // 2, 2).transpose(1, 2)
