"""Matrices of 4 and 8 bits as the kernels of packed_kernels.py take them: what a checkpoint has in groups, packed.

Scales and zeros are kept in half precision, as a share of a power of two for each output; those of MXFP4 stay
exponents. Nothing waits for the device once a matrix is packed, and all shapes follow from those of the inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

import torch
import triton
from torch import Tensor

from weft.engine.kernels.triton import products_jit as kernels
from weft.engine.weights.groups import FP4, Groups
from weft.engine.weights.quantization import Scheme

Kind = Literal["int4", "int8", "fp4", "fp8"]

MANY_ROWS = 64
"""Rows that a program computes where there are more than _FEW_ROWS, and always if that has to be the same."""

_FEW_ROWS = 16
_STEP = 64
"""Inputs of a row of 4 bits are padded to a multiple."""

_MANY_PROGRAMS = 128
"""About as many as a GPU has multiprocessors: with fewer, each computes fewer outputs."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a matrix is packed.

    Attributes:
        kind: Integers, e2m1 or e4m3.
        group: Inputs that share a scale; None for all.
        has_zeros: Whether groups have zero points.
        has_exponents: Whether scales are powers of two, in a byte.
    """

    kind: Kind
    group: int | None = None
    has_zeros: bool = False
    has_exponents: bool = False

    @property
    def per_octet(self) -> int:
        """Weights in a byte."""
        return 2 if self.kind in ("int4", "fp4") else 1

    @property
    def run(self) -> int:
        """Neighbouring inputs that have one scale; see packed_kernels.py."""
        return 32 if self.group is None or self.group % 32 == 0 else 16

    def row_bytes(self, in_features: int) -> int:
        """Bytes of the weights of an output."""
        return -(-in_features // _STEP) * _STEP // 2 if self.per_octet == 2 else in_features

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of a matrix with scales, zeros and factors."""
        num_groups = 1 if self.group is None else -(-in_features // self.group)
        group_bytes = 1 if self.has_exponents else torch.half.itemsize * (1 + self.has_zeros)
        return out_features * (self.row_bytes(in_features) + num_groups * group_bytes + torch.float32.itemsize)

    def supports(self, in_features: int) -> bool:
        """Whether rows are whole runs."""
        return in_features % self.run == 0 and (self.group is None or self.group % self.run == 0)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix, or those of several experts, then with a first dimension more.

    Attributes:
        codes: (out_features, row_bytes) uint8.
        scales: (out_features, number of groups) float16, or uint8 exponents.
        zeros: The same, float16; None without.
        factors: (out_features,) float32, of all that an output sums.
    """

    form: Form
    in_features: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    factors: Tensor

    @property
    def out_features(self) -> int:
        """Outputs, of each expert."""
        return self.codes.size(-2)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(part.nbytes for part in self._parts)

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        zeros = () if self.zeros is None else (self.zeros,)
        return self.codes, self.scales, *zeros, self.factors

    def empty_experts(self, num_experts: int) -> "PackedMatrix":
        """Room for as many matrices like this one."""
        codes, scales, *zeros, factors = (part.new_empty(num_experts, *part.shape) for part in self._parts)
        return replace(self, codes=codes, scales=scales, zeros=zeros[0] if zeros else None, factors=factors)

    def put(self, index: int, matrix: "PackedMatrix") -> None:
        """Keep the matrix of an expert, which has the same form."""
        for part, source in zip(self._parts, matrix._parts, strict=True):
            part[index] = source

    def multiply(
        self,
        inputs: Tensor,
        bias: Tensor | None,
        outputs: Tensor,
        *,
        ends: Tensor | None = None,
        adds: bool = False,
        is_deterministic: bool = False,
    ) -> Tensor:
        """Launch `multiply_packed` of packed_kernels.py for inputs (num_rows, in_features) of 16 bits; returns outputs.

        Args:
            bias: (out_features,), of each expert; None without.
            outputs: (num_rows, out_features); columns have stride 1.
            ends: (num_experts,) int32: rows lie in the order of their experts, whose ends these are; None for none.
            adds: Add to outputs.
            is_deterministic: A row's bits do not depend on how many rows there are.
        """
        inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
        num_rows, num_outs, num_experts = len(inputs), self.out_features, 1 if ends is None else len(ends)
        if not num_rows:
            return outputs
        is_many = is_deterministic or num_rows > _FEW_ROWS * (1 if ends is None else 2 * num_experts)
        rows, outs = (MANY_ROWS, 64) if is_many else (_FEW_ROWS, 32 if num_outs >= 32 * _MANY_PROGRAMS else 16)
        num_blocks = triton.cdiv(num_rows, rows)
        if ends is not None:
            num_blocks = min(num_rows, num_rows // rows + num_experts)
        kernels.multiply_packed[(num_blocks, triton.cdiv(num_outs, outs))](
            *(inputs, *self._arguments(), self.factors, self.scales if bias is None else bias, outputs),
            *(self.scales if ends is None else ends, num_rows, num_experts, num_outs, *self._sizes()),
            *(inputs.stride(0), outputs.stride(0)),
            KIND=self.form.kind,
            RUN=self.form.run,
            HAS_ZEROS=self.zeros is not None,
            HAS_BIAS=bias is not None,
            ADDS=adds,
            EXPERTS=0 if ends is None else triton.next_power_of_2(num_experts),
            ROWS=rows,
            OUTS=outs,
            OCTETS=64 if is_many else 128,
            SLICES=1 if is_many else 8,
            num_warps=4 if is_many else 8,
            num_stages=4,
        )
        return outputs

    def unpack(self, dtype: torch.dtype, *, first: int = 0, num_rows: int = 0, ids: Tensor | None = None) -> Tensor:
        """Rows of the matrix in a dtype: num_rows from the first on, or those of ids (num_rows,) int64."""
        num_rows = num_rows if ids is None else len(ids)
        outputs = torch.empty(num_rows, self.in_features, dtype=dtype, device=self.codes.device)
        outs, octets = (1 if ids is not None else 16), 256
        if num_rows:
            kernels.unpack[(triton.cdiv(num_rows, outs), triton.cdiv(self.codes.size(-1), octets))](
                *(*self._arguments(), self.factors, self.scales if ids is None else ids, outputs),
                *(first, num_rows, *self._sizes()),
                KIND=self.form.kind,
                RUN=self.form.run,
                HAS_ZEROS=self.zeros is not None,
                HAS_IDS=ids is not None,
                OUTS=outs,
                OCTETS=octets,
            )
        return outputs

    def _arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """An absent tensor is not read."""
        return self.codes, self.scales, self.scales if self.zeros is None else self.zeros

    def _sizes(self) -> tuple[int, int, int, int]:
        group = self.form.group or 2 * self.in_features
        return self.in_features, self.codes.size(-1), self.scales.size(-1), group


def form_of(scheme: Scheme, in_features: int, first_input: int = 0) -> Form | None:
    """The form of a matrix that a checkpoint has so, before anything is read; None if it is not kept so.

    Args:
        first_input: Of the whole matrix, if it is a part of one.
    """
    if scheme.bits > 8 or (scheme.is_float and scheme.bits not in (4, 8)):
        return None
    is_fp4 = scheme.is_float and scheme.bits == 4 and not scheme.has_table
    is_int4 = scheme.bits <= 4 and not scheme.is_float
    kind: Kind = "fp4" if is_fp4 else "int4" if is_int4 else "fp8" if scheme.is_float and scheme.bits == 8 else "int8"
    size = scheme.block[1] if scheme.block else scheme.group_size
    group = None if size is None or size >= in_features else size
    if size is not None and first_input % size:  # inside of a group: then scales are those of runs, see `_by_runs`
        group = gcd(first_input, 32)
    form = Form(kind, group, scheme.has_zeros, is_fp4 and scheme.group_size == group == 32)
    return form if form.supports(in_features) else None


def common_form(forms: Sequence[Form | None]) -> Form | None:
    """The form of several matrices in one, as `groups.stacked` makes it; None if it is plain."""
    first, known = forms[0], [form for form in forms if form is not None]
    if all(form == first for form in forms):
        return first
    kinds, sizes = {form.kind for form in known}, [form.group for form in known if form.group is not None]
    if len(known) < len(forms) or "fp8" in kinds:
        return None
    kind: Kind = "int4" if kinds == {"int4"} else "int8"
    return Form(kind, min(sizes, default=None), any(form.has_zeros for form in known))


def pack(groups: Groups, wanted: Form | None = None) -> PackedMatrix | None:
    """A checkpoint's groups, packed: exactly, but for the precision of scales; None if the kernels cannot read them.

    Args:
        wanted: The only form that will do.
    """
    groups = groups.without_table()
    groups = groups if groups.offsets is None else _with_zeros(groups, groups.offsets)
    kind = _kind(groups) if wanted is None else wanted.kind
    codes = None if kind is None else _codes(groups.values, kind)
    arranged = _by_runs(groups)
    if kind is None or codes is None or arranged is None:
        return None
    scales, zeros, group = arranged
    exponents = _exponents(scales) if kind == "fp4" and group == 32 and zeros is None else None
    form = Form(kind, group, zeros is not None, exponents is not None)
    if wanted is not None and wanted.has_zeros and zeros is None:
        form, zeros = replace(form, has_zeros=True), torch.zeros_like(scales)
    if wanted not in (None, form) or not form.supports(groups.values.size(1)):
        return None
    factors = torch.ones(len(codes), device=codes.device)
    if exponents is None:
        largest = scales.abs().amax(1)
        factors = torch.where(largest > 0, torch.exp2(torch.frexp(largest).exponent.float()), factors)
        exponents = (scales / factors[:, None] * (2 if kind == "fp4" else 1)).half()  # as codes are half of values
    halves = None if zeros is None else zeros.half().contiguous()
    if halves is not None and (~halves.isfinite()).any():
        return None
    octets = codes if form.per_octet == 1 else _joined(codes, form)
    return PackedMatrix(form, groups.values.size(1), octets.contiguous(), exponents.contiguous(), halves, factors)


def _kind(groups: Groups) -> Kind | None:
    """By the values; what fits 4 bits in both ways means the same in both."""
    if groups.values.dtype == torch.float8_e4m3fn:
        return "fp8"
    if groups.values.dtype != torch.int8:
        return None
    least, most = groups.values.aminmax()
    if groups.bits > 4 or -8 <= least <= most < 8:
        return "int8" if groups.bits > 4 else "int4"
    return "fp4" if _codes(groups.values, "fp4") is not None else "int8"


def _codes(values: Tensor, kind: Kind) -> Tensor | None:
    """One in a byte; None if a value has none."""
    if values.dtype != (torch.float8_e4m3fn if kind == "fp8" else torch.int8):
        return None
    if kind in ("int8", "fp8"):
        return values.view(torch.uint8)
    if kind == "int4":
        codes = values.view(torch.uint8) + 8  # wraps
        return None if (codes > 15).any() else codes
    table = torch.full((256,), 255, dtype=torch.uint8, device=values.device)
    for code, value in enumerate(FP4):
        table[-value], table[value] = code + 8, code
    codes = table[values.view(torch.uint8).int()]
    return None if (codes == 255).any() else codes


def _with_zeros(groups: Groups, offsets: Tensor) -> Groups:
    """The same with zero points in place of offsets, and values of 4 bits as signed ones."""
    # Then all weights are the offset, or as good as that, and a zero point would be no number in half precision.
    values, is_flat = groups.values, groups.scales.abs() * 2**15 <= offsets.abs()
    places = torch.arange(values.size(1), device=values.device) // groups.group_size
    places = places.clamp(max=offsets.size(1) - 1) if groups.group_of is None else groups.group_of
    values = values.masked_fill(is_flat[:, places], 0)
    scales = torch.where(is_flat, offsets.abs().clamp(min=1e-30), groups.scales)
    zeros = offsets / scales
    if (values >= 0).all() and (values < 16).all():
        values, zeros = values - 8, zeros - 8
    return replace(groups, values=values, scales=scales, zeros=zeros, offsets=None)


def _by_runs(groups: Groups) -> tuple[Tensor, Tensor | None, int | None] | None:
    """Scales, zeros and the inputs that share them, None for all, where groups lie in order; None where they do not."""
    scales, zeros, inputs = groups.scales.float(), groups.zeros, groups.values.size(1)
    if groups.group_of is None:
        return scales, zeros, None if scales.size(1) == 1 else groups.group_size
    for run in (32, 16):  # a rank's part may begin inside of a group
        picked = groups.group_of.view(-1, run) if inputs % run == 0 else None
        if picked is not None and (picked == picked[:, :1]).all():
            first = picked[:, 0]
            return scales[:, first], None if zeros is None else zeros[:, first], run
    return None


def _exponents(scales: Tensor) -> Tensor | None:
    """Twice the scales, as e8m0; None if they are no powers of two."""
    digits, powers = torch.frexp(scales)
    octets = torch.where(scales == 0, 0, powers + 127)
    are_powers = ((digits == 0.5) | (digits == 0)).all() and octets.min() >= 0 and octets.max() < 255
    return octets.to(torch.uint8) if are_powers else None


def _joined(codes: Tensor, form: Form) -> Tensor:
    """Two codes in a byte, a run beside the next one."""
    padded = torch.nn.functional.pad(codes, (0, -codes.size(1) % _STEP))
    low, high = padded.view(len(codes), -1, 2, form.run).unbind(2)
    return (low | high << 4).flatten(1)
