"""Quantized matrices as values and the scales of their groups: what every format decodes to, and rounding to it.

A group is some inputs of one output, which are neighbours in most formats, or all of them. Plain matrices are rounded
on any device: to int8 or fp8 with a scale for each output, or to 4 bits in groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

_Packed = TypeVar("_Packed")

_CHUNK_VALUES = 1 << 24
"""Values that are in float32 at once."""


@dataclass(frozen=True, slots=True)
class Groups:
    """A matrix whose inputs share scales in groups: a weight is (value - zero) * scale - offset, in float32.

    Attributes:
        values: (out_features, in_features), int8; float8 of fp8, and float32 where a format has a table of values.
        scales: (out_features, number of groups) float32.
        zeros: Of the same shape; None if all are 0.
        bits: Of a value in the checkpoint.
        group_size: Inputs in a group; fewer in the last.
        group_of: (in_features,) int64, the group of each input; None if groups lie one after another.
        offsets: Of the shape of scales, where there are no zeros; None if all are 0.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    group_of: Tensor | None = None
    offsets: Tensor | None = None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """(out_features, in_features); rounded once, from float32."""
        (num_outputs, num_inputs), num_groups = self.values.shape, self.scales.shape[1]
        weights = torch.empty(num_outputs, num_inputs, dtype=dtype, device=self.values.device)
        group_of = self.group_of
        if group_of is None and num_groups > 1 and num_inputs % self.group_size:  # the last is not whole
            group_of = torch.arange(num_inputs, device=weights.device) // self.group_size
        for part in _row_chunks(self.values):
            plain = self.values[part].to(torch.float32, copy=True)
            grouped = plain.view(len(plain), num_groups, -1) if group_of is None else plain
            of_each = (slice(None), slice(None), None) if group_of is None else (slice(None), group_of)
            if self.zeros is not None:
                grouped -= self.zeros[part][of_each]
            grouped *= self.scales[part][of_each]
            if self.offsets is not None:
                grouped -= self.offsets[part][of_each]
            weights[part] = plain
        return weights

    def part(self, rows: Tensor, columns: slice = slice(None)) -> "Groups":
        """These outputs, in this order, and these inputs, which may begin or end inside of a group."""
        start, stop, _ = columns.indices(self.values.shape[1])
        values, group_of, size = self.values[rows, start:stop], self.group_of, self.group_size
        kept = slice(None)
        if group_of is not None:
            group_of = group_of[start:stop]
        elif self.scales.shape[1] > 1:
            kept = slice(start // size, -(-stop // size))
            if start % size:
                group_of = torch.arange(start, stop, device=values.device) // size - kept.start
        parts = self.scales, self.zeros, self.offsets
        scales, zeros, offsets = (None if part is None else part[rows][:, kept] for part in parts)
        assert scales is not None
        return replace(self, values=values, scales=scales, zeros=zeros, group_of=group_of, offsets=offsets)

    def without_table(self) -> "Groups":
        """The same with int8 in place of float32 values of a table, from -1 to 1, which are rounded."""
        if self.values.dtype != torch.float32:
            return self
        return replace(self, values=(self.values * 127).round().to(torch.int8), scales=self.scales / 127)

    def side_by_side(self) -> "tuple[Groups, Tensor] | None":
        """The same with the inputs of each group in one place, and which these are; None if groups are not whole."""
        if self.group_of is None:
            return None
        order = self.group_of.argsort(stable=True)
        in_order = torch.arange(len(order), device=order.device) // self.group_size
        if not torch.equal(self.group_of[order], in_order):
            return None
        return replace(self, values=self.values[:, order], group_of=None), order

    def divided(self, size: int) -> "Groups":
        """The same in groups of fewer inputs, of which so many are whole groups."""
        times = self.group_size // size
        if times == 1:
            return self
        scales, zeros, offsets = (
            None if numbers is None else numbers.repeat_interleave(times, 1)
            for numbers in (self.scales, self.zeros, self.offsets)
        )
        assert scales is not None
        return replace(self, scales=scales, zeros=zeros, offsets=offsets, group_size=size)


def _row_chunks(matrix: Tensor) -> list[slice]:
    size = max(1, _CHUNK_VALUES // matrix.size(1))
    return [slice(first, first + size) for first in range(0, len(matrix), size)]


def packed_in_order(groups: Groups, pack: Callable[[Groups], _Packed | None]) -> tuple[_Packed | None, Tensor | None]:
    """What `pack` makes of the groups, None if it cannot, and the order of inputs that this needs; None for theirs."""
    packed = pack(groups)
    found = None if packed is not None else groups.side_by_side()
    if found is None:
        return packed, None
    packed = pack(found[0])
    return packed, None if packed is None else found[1]


def stacked(parts: Sequence[Groups]) -> Groups | None:
    """Matrices of the same inputs, one below the other; None if they cannot have groups of one size."""
    size = min(part.group_size for part in parts)
    if all(part.group_of is None and part.group_size % size == 0 for part in parts):
        parts = [part.divided(size) for part in parts]
    first, *others = parts
    for other in others:
        are_alike = (
            first.values.dtype == other.values.dtype
            and (first.bits == other.bits or first.values.dtype == torch.int8)
            and first.scales.shape[1] == other.scales.shape[1]
            and (first.scales.shape[1] == 1 or first.group_size == other.group_size)
        )
        if not are_alike or not _equal(first.group_of, other.group_of):
            return None
    values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
    zeros, offsets = _joined([part.zeros for part in parts], parts), _joined([part.offsets for part in parts], parts)
    if zeros is not None and offsets is not None:
        return None
    return replace(first, values=values, scales=scales, zeros=zeros, offsets=offsets)


def _joined(numbers: Sequence[Tensor | None], parts: Sequence[Groups]) -> Tensor | None:
    """Zeros or offsets of all parts; None if no part has any."""
    if all(of_part is None for of_part in numbers):
        return None
    pairs = zip(numbers, parts, strict=True)
    return torch.cat([torch.zeros_like(part.scales) if of_part is None else of_part for of_part, part in pairs])


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def unpack(words: Tensor, bits: int) -> Tensor:
    """The values that lie in the last dimension of words or bytes, lowest bits first, as uint8; bits divides 8."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=octets.device)
    return ((octets[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def centred(values: Tensor, bits: int) -> Tensor:
    """Unsigned values less half of their range, as int8."""
    return (values - (1 << (bits - 1))).view(torch.int8)  # wraps


FP4 = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the values of e2m1 that are not negative, by code."""


def fp4_groups(octets: Tensor, scales: Tensor, group_size: int) -> Groups:
    """Pairs of e2m1 values (out_features, in_features / 2), the first in the low bits."""
    table = torch.tensor([*FP4, *(-value for value in FP4)], dtype=torch.int8, device=octets.device)
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), 1).view(torch.int16)
    values = pairs.squeeze(1)[octets.int()].view(torch.int8)
    return Groups(values, scales * 0.5, None, 4, group_size)


def e8m0(exponents: Tensor) -> Tensor:
    """Powers of two, stored as bytes."""
    return (exponents.view(torch.uint8).int() << 23).view(torch.float32)


Storage = Literal["none", "int8", "int4", "fp8"]
"""How plain matrices are kept; see `--quantization`."""

_GROUP = 32
"""Inputs that share a scale and a zero point in 4 bits."""
_NUM_RANGES, _RANGE_STEP = 10, 0.04
"""Ranges of a group that are tried, each shorter than the one before by this part of the first."""


def round_matrix(weight: Tensor, storage: Storage) -> Groups:
    """Weight (out_features, in_features) as it is kept, which is not plain."""
    if storage == "int4":
        return round_to_4_bits(weight)
    return round_outputs(weight, torch.int8 if storage == "int8" else torch.float8_e4m3fn)


def round_outputs(weight: Tensor, dtype: torch.dtype) -> Groups:
    """Weight (out_features, in_features) in int8 or float8_e4m3fn: the largest weight of an output is the largest."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    values = torch.empty_like(weight, dtype=dtype)
    scales = torch.empty(len(weight), 1, device=weight.device)
    for part in _row_chunks(weight):
        plain = weight[part].float()
        scales[part] = plain.abs().amax(1, keepdim=True).clamp_(min=1e-12) / largest
        scaled = plain.div_(scales[part]).clamp_(-largest, largest)
        values[part] = (scaled.round_() if dtype == torch.int8 else scaled).to(dtype)
    return Groups(values, scales, None, 8, weight.size(1))


def round_to_4_bits(weight: Tensor) -> Groups:
    """In groups of 32 inputs with zero points.

    Of several ranges of a group, from its extremes inward, that with the least squared error is taken, and then the
    line that fits its values best, as pack_grouped.c does on the CPU.
    """
    num_outputs, num_inputs = weight.shape
    values = torch.empty_like(weight, dtype=torch.int8)
    scales, zeros = (torch.empty(num_outputs, num_inputs // _GROUP, device=weight.device) for _ in range(2))
    for part in _row_chunks(weight):
        plain = weight[part].float().view(-1, num_inputs // _GROUP, _GROUP)
        codes, scales[part], zeros[part] = _round_groups(plain)
        values[part] = (codes - 8).flatten(1).to(torch.int8)
    return Groups(values, scales, zeros - 8, 4, _GROUP)


def _round_groups(plain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of (..., _GROUP) the codes 0 to 15 in float32; scales and zero points (...): (code - zero) * scale."""
    least, most = (part.unsqueeze(-1) for part in plain.aminmax(dim=-1))
    best_error = torch.full_like(least, torch.inf)
    best = torch.zeros_like(plain)
    for index in range(_NUM_RANGES):
        kept, middle = 1 - _RANGE_STEP * index, 0.5 * (least + most)
        first = middle + (least - middle) * kept
        step = ((most - least) * (kept / 15)).clamp_(min=1e-12)
        codes = ((plain - first) / step).round_().clamp_(0, 15)
        error = (codes * step + first - plain).square_().sum(-1, keepdim=True)
        is_better = error < best_error
        best, best_error = torch.where(is_better, codes, best), torch.where(is_better, error, best_error)
    centre, mean = best.mean(-1, keepdim=True), plain.mean(-1, keepdim=True)
    spread = (best - centre).square_().sum(-1, keepdim=True)
    fitted = ((best - centre) * (plain - mean)).sum(-1, keepdim=True) / spread
    is_wide = (spread > 0) & (fitted.abs() > mean.abs() * 1e-4)  # else all are alike, one step from zero
    scale = torch.where(is_wide, fitted, mean.abs().clamp_(min=1e-12))
    best, centre = torch.where(is_wide, best, 0.0), torch.where(is_wide, centre, 0.0)
    return best, scale.squeeze(-1), (centre - mean / scale).squeeze(-1)
