"""Quantized values and their scales, as every format decodes to them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

_CHUNK_VALUES = 1 << 24
"""Values that are in float32 at once."""


@dataclass(frozen=True, slots=True)
class Groups:
    """A matrix whose inputs share scales in groups: a weight is (value - zero) * scale, in float32.

    Attributes:
        values: (out_features, in_features), int8; float8 of fp8, and float32 where a format has a table of values.
        scales: (out_features, number of groups) float32.
        zeros: Of the same shape; None if all are 0.
        bits: Of a value in the checkpoint.
        group_size: Inputs in a group; fewer in the last.
        group_of: (in_features,) int64, the group of each input; None if groups lie one after another.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group_size: int
    group_of: torch.Tensor | None = None

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """(out_features, in_features); rounded once, from float32."""
        (num_outputs, num_inputs), num_groups = self.values.shape, self.scales.shape[1]
        weights = torch.empty(num_outputs, num_inputs, dtype=dtype, device=self.values.device)
        group_of = self.group_of
        if group_of is None and num_groups > 1 and num_inputs % self.group_size:  # the last is not whole
            group_of = torch.arange(num_inputs, device=weights.device) // self.group_size
        rows = max(1, _CHUNK_VALUES // num_inputs)
        for first in range(0, num_outputs, rows):
            part = slice(first, first + rows)
            plain = self.values[part].to(torch.float32, copy=True)
            scales, zeros = self.scales[part], None if self.zeros is None else self.zeros[part]
            if group_of is None:
                grouped, scales = plain.view(len(plain), num_groups, -1), scales[..., None]
                zeros = None if zeros is None else zeros[..., None]
            else:
                grouped, scales = plain, scales[:, group_of]
                zeros = None if zeros is None else zeros[:, group_of]
            if zeros is not None:
                grouped -= zeros
            grouped *= scales
            weights[part] = plain
        return weights

    def part(self, rows: torch.Tensor, columns: slice = slice(None)) -> "Groups":
        """These outputs, in this order, and these inputs, which may begin or end inside of a group."""
        start, stop, _ = columns.indices(self.values.shape[1])
        values, scales = self.values[rows, start:stop], self.scales[rows]
        zeros = None if self.zeros is None else self.zeros[rows]
        group_of, size = self.group_of, self.group_size
        if group_of is not None:
            group_of = group_of[start:stop]
        elif scales.shape[1] > 1:
            first, last = start // size, -(-stop // size)
            scales, zeros = scales[:, first:last], None if zeros is None else zeros[:, first:last]
            if start % size:
                group_of = torch.arange(start, stop, device=values.device) // size - first
        return replace(self, values=values, scales=scales, zeros=zeros, group_of=group_of)


def stacked(parts: Sequence[Groups]) -> Groups | None:
    """Matrices of the same inputs, one below the other; None if they are not quantized alike."""
    first, *others = parts
    for other in others:
        are_alike = (
            first.bits == other.bits
            and first.values.dtype == other.values.dtype
            and first.scales.shape[1] == other.scales.shape[1]
            and (first.scales.shape[1] == 1 or first.group_size == other.group_size)
        )
        if not are_alike or not _equal(first.group_of, other.group_of):
            return None
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([torch.zeros_like(part.scales) if part.zeros is None else part.zeros for part in parts])
    values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
    return replace(first, values=values, scales=scales, zeros=zeros)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The values that lie in the last dimension of words or bytes, lowest bits first, as uint8; bits divides 8."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=octets.device)
    return ((octets[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def centred(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned values less half of their range, as int8."""
    return (values - (1 << (bits - 1))).view(torch.int8)  # wraps


FP4 = (0, 1, 2, 3, 4, 6, 8, 12)


def fp4_groups(octets: torch.Tensor, scales: torch.Tensor, group_size: int) -> Groups:
    """Pairs of e2m1 values (out_features, in_features / 2), the first in the low bits. Twice a value is an integer."""
    table = torch.tensor([*FP4, *(-value for value in FP4)], dtype=torch.int8, device=octets.device)
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), 1).view(torch.int16)
    values = pairs.squeeze(1)[octets.int()].view(torch.int8)
    return Groups(values, scales * 0.5, None, 4, group_size)


def e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Powers of two, stored as bytes."""
    return (exponents.view(torch.uint8).int() << 23).view(torch.float32)
