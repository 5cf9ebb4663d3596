"""Rounds 16-bit matrices, on any device: to int8 or fp8 with a scale for each output, or to 4 bits in groups."""

from typing import Literal

import torch

from weft.engine.weights.groups import Groups

Storage = Literal["none", "int8", "int4", "fp8"]
"""How plain matrices are kept; see `--quantization`."""

_GROUP = 32
_NUM_RANGES, _RANGE_STEP = 10, 0.04
_CHUNK_VALUES = 1 << 24
"""Values that are in float32 at once."""


def round_matrix(weight: torch.Tensor, storage: Storage) -> Groups:
    """Weight (out_features, in_features) as it is kept, which is not plain."""
    if storage == "int4":
        return round_to_4_bits(weight)
    return round_outputs(weight, torch.int8 if storage == "int8" else torch.float8_e4m3fn)


def round_outputs(weight: torch.Tensor, dtype: torch.dtype) -> Groups:
    """Weight (out_features, in_features) in int8 or float8_e4m3fn: the largest weight of an output is the largest."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    values = torch.empty_like(weight, dtype=dtype)
    scales = torch.empty(len(weight), 1, device=weight.device)
    for part in _parts(weight):
        plain = weight[part].float()
        scales[part] = plain.abs().amax(1, keepdim=True).clamp_(min=1e-12) / largest
        scaled = plain.div_(scales[part]).clamp_(-largest, largest)
        values[part] = (scaled.round_() if dtype == torch.int8 else scaled).to(dtype)
    return Groups(values, scales, None, 8, weight.size(1))


def round_to_4_bits(weight: torch.Tensor) -> Groups:
    """In groups of 32 inputs with zero points.

    Of several ranges of a group, from its extremes inward, that with the least squared error is taken, and then the
    line that fits its values best, as round_groups.c does on the CPU.
    """
    num_outputs, num_inputs = weight.shape
    values = torch.empty_like(weight, dtype=torch.int8)
    scales, zeros = (torch.empty(num_outputs, num_inputs // _GROUP, device=weight.device) for _ in range(2))
    for part in _parts(weight):
        plain = weight[part].float().view(-1, num_inputs // _GROUP, _GROUP)
        codes, scales[part], zeros[part] = _round_groups(plain)
        values[part] = (codes - 8).flatten(1).to(torch.int8)
    return Groups(values, scales, zeros - 8, 4, _GROUP)


def _round_groups(plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


def _parts(weight: torch.Tensor) -> list[slice]:
    size = max(1, _CHUNK_VALUES // weight.size(1))
    return [slice(first, first + size) for first in range(0, len(weight), size)]
