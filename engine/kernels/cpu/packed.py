"""Packs a matrix for the native kernels, in bfloat16 or as integers of 4, 6 and 8 bits in groups.

linear.c and grouped_layout.h describe the layouts. The plain weight is not kept. In a form of groups, every 16 or 32
inputs of an output share a scale and, in some forms, an offset: a weight is scale * q - offset, q without sign, or
scale * (q - centre) without offsets. What a checkpoint has in groups of whole runs of 32 inputs is kept as it is, with
the scale of its group for every run.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from weft.engine.kernels.cpu.library import NativeLibrary, allocate
from weft.engine.weights.groups import Groups
from weft.engine.weights.quantization import Scheme

PANEL, TILE = 16, 32
"""Outputs in a panel of packed weights; inputs of a bfloat16 row are padded to a multiple of the second number."""

STEP = 64
"""Inputs of a row in groups are padded to a multiple."""

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_HALF_BYTES, _FACTOR_BYTES = 2, 4


@dataclass(frozen=True, slots=True)
class Form:
    """How the integers are stored.

    Attributes:
        bits: 4, 6 or 8.
        group: Inputs that share a scale; 32, or 16 with 6 or 8 bits.
        has_offset: Whether groups have offsets, too.
    """

    bits: int
    group: int
    has_offset: bool = False

    @property
    def code(self) -> int:
        """The number that C reads."""
        return self.bits | self.group << 8 | self.has_offset << 16

    @property
    def centre(self) -> int:
        """The integer that stands for zero where there are no offsets."""
        return 1 << (self.bits - 1)

    def row_bytes(self, in_features: int) -> int:
        """Bytes of an output's weights, scales and offsets."""
        step = STEP * self.bits // 8 + STEP // self.group * _HALF_BYTES * (1 + self.has_offset)
        return -(-in_features // STEP) * step

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of a matrix."""
        return out_features * (self.row_bytes(in_features) + _FACTOR_BYTES)


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """The integers of a matrix, before they are packed.

    Attributes:
        values: (out_features, in_features) uint8.
        scales: (out_features, in_features / group) float32.
        offsets: Of the same shape; None for a form without.
    """

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Outputs and inputs."""
        return self.values.shape

    def chunk(self, num_parts: int) -> "list[GroupedRows]":
        """Parts of equally many outputs."""
        none = [None] * num_parts
        offsets = none if self.offsets is None else self.offsets.chunk(num_parts)
        parts = zip(self.values.chunk(num_parts), self.scales.chunk(num_parts), offsets, strict=True)
        return [GroupedRows(*part) for part in parts]

    def pack(self, library: NativeLibrary, form: Form, weights: torch.Tensor, factors: torch.Tensor) -> None:
        """Write weights and factors, which must be zero before, for C; numbers in half precision keep their range."""
        num_outputs, num_inputs = self.values.shape
        parts = [self.scales] if self.offsets is None else [self.scales, self.offsets]
        largest = torch.stack([part.abs().amax(dim=1) for part in parts]).amax(dim=0)
        powers = torch.where(largest > 0, torch.exp2(torch.frexp(largest).exponent.float()), 1.0)
        halves = [(part / powers[:, None]).half().contiguous() for part in parts]
        factors[:num_outputs] = powers
        pack = library.function("weft_pack_linear_grouped", *(_POINTER,) * 3, *(_SIZE,) * 3, _POINTER)
        values, offsets = self.values.contiguous(), halves[1].data_ptr() if self.offsets is not None else None
        pointers = values.data_ptr(), halves[0].data_ptr(), offsets
        pack(*pointers, num_outputs, num_inputs, form.code, weights.data_ptr())


def rows_of(groups: Groups, wanted: Form | None = None) -> tuple[Form, GroupedRows] | None:
    """A checkpoint's groups as the kernels take them, exactly but for the precision of scales; None if they cannot.

    Args:
        wanted: The only form that will do.
    """
    groups = groups.without_table()
    num_inputs, num_groups = groups.values.shape[1], groups.scales.shape[1]
    size = num_inputs if num_groups == 1 else groups.group_size
    group = 16 if size == 16 else 32
    if groups.values.dtype != torch.int8 or num_inputs % 32:
        return None
    group_of = torch.arange(num_inputs) // size if groups.group_of is None else groups.group_of
    picked = group_of.view(-1, group)  # of a rank's part the first group, too, may be a piece
    if (picked != picked[:, :1]).any():
        return None
    has_offset = groups.zeros is not None or groups.offsets is not None
    extremes = groups.values.amin(1, keepdim=True), groups.values.amax(1, keepdim=True)  # faster than aminmax
    least, most = (extreme.int() for extreme in extremes)
    are_unsigned = (least >= 0) if groups.offsets is not None else torch.zeros_like(least, dtype=torch.bool)
    largest = torch.where(are_unsigned, most, 2 * torch.maximum(-1 - least, most) + 1)
    form = Form(_bits(int(largest.max()).bit_length(), group), group, has_offset)
    if wanted and wanted != form:
        if wanted.bits < form.bits or wanted.group != group or wanted.has_offset < has_offset:
            return None
        form = wanted
    centres = torch.where(are_unsigned, 0, form.centre)  # powers of two, by which halves are multiplied exactly
    scales = groups.scales.float()
    offsets = None
    if form.has_offset:
        zeros = 0.0 if groups.zeros is None else groups.zeros.float()
        offsets = (zeros + centres) * scales + (0.0 if groups.offsets is None else groups.offsets)
    if size != group or groups.group_of is not None:
        places = picked[:, 0]
        scales = scales[:, places]
        offsets = None if offsets is None else offsets[:, places]
    values = groups.values.view(torch.uint8) + centres.to(torch.uint8)  # wraps
    return form, GroupedRows(values, scales, offsets)


def form_of(scheme: Scheme, in_features: int) -> Form | None:
    """The form that `rows_of` finds for a scheme, before anything is read."""
    size = scheme.group_size or in_features
    group = 16 if size == 16 else 32
    is_taken = not (scheme.block or (scheme.is_float and scheme.bits == 8))
    if not is_taken or in_features % 32 or size % group:
        return None
    bits = 8 if scheme.has_table else 5 if scheme.is_float else scheme.bits  # floats of 4 bits are up to 12 halves
    return Form(_bits(bits, group), group, scheme.has_zeros)


def common_form(forms: Sequence[Form]) -> Form:
    """The form of several matrices in one, as `groups.stacked` makes it."""
    group = min(form.group for form in forms)
    bits = max(form.bits for form in forms)
    return Form(_bits(bits, group), group, any(form.has_offset for form in forms))


def _bits(least: int, group: int) -> int:
    """Bits of the form that holds integers of so many."""
    return 4 if least <= 4 and group == 32 else 6 if least <= 6 else 8


def round_rows(library: NativeLibrary, weight: torch.Tensor, form: Form) -> GroupedRows:
    """Round a bfloat16 matrix to 4 bits with offsets, or to 8 bits without; pack_grouped.c says how."""
    assert form.group == 32 and form.has_offset == (form.bits == 4)
    plain = weight.contiguous()
    num_outputs, num_inputs = plain.shape
    groups = num_outputs, num_inputs // 32
    values = torch.empty(num_outputs, num_inputs, dtype=torch.uint8)
    scales, offsets = torch.empty(groups), torch.empty(groups) if form.has_offset else None
    function = library.function("weft_round_groups", _POINTER, _SIZE, _SIZE, *(_POINTER,) * 3)
    targets = values.data_ptr(), scales.data_ptr(), None if offsets is None else offsets.data_ptr()
    function(plain.data_ptr(), num_outputs, num_inputs, *targets)
    return GroupedRows(values, scales, offsets)


Storage = Literal["bfloat16"] | Form
"""How a matrix is kept."""


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
