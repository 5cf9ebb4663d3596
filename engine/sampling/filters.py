"""min-p, top-k and top-p as floors: an id is kept when its number is at least the row's floor.

Owns how much of the distribution is left to draw from. A floor is one of the row's own numbers, so ids that tie are
kept or dropped together, and neither the order of a sort nor the other rows of the batch can matter. Masks are
floats to multiply with, several times faster on a CPU than filling by a boolean mask.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.engine.sampling import chunks
from weft.engine.step.transfer import to_device

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float32]

_FIRST_CUT = 1e-4
"""Ids this much less probable than the best are sorted only when the rest falls short of the nucleus' mass."""

_BITS_OF_ONE = 0x3F800000


def logit_floors(logits: Tensor, maxima: Tensor, temperatures: _Floats, top_ks: _Ints, min_ps: _Floats) -> Tensor:
    """The smallest logit that min-p and top-k both keep.

    Args:
        logits: (num_rows, vocab_size) float32.
        maxima: (num_rows, 1) largest logit of each row.
        temperatures: (num_rows,) > 0; min-p compares probabilities after temperature.
        top_ks: (num_rows,) 0 keeps all.
        min_ps: (num_rows,) 0 keeps all.

    Returns:
        (num_rows, 1) float32; -inf keeps all.
    """
    with np.errstate(divide="ignore"):
        margins = temperatures * np.log(min_ps)  # log(0) = -inf keeps all
    floors = maxima + to_device(margins, logits.device)[:, None]
    limited = np.flatnonzero((top_ks > 0) & (top_ks < logits.shape[-1]))
    if len(limited) == 0:
        return floors
    rows = to_device(limited, logits.device)
    largest = chunks.top_values(select_rows(logits, limited), int(top_ks[limited].max()))
    kth = largest.gather(-1, to_device(top_ks[limited] - 1, logits.device)[:, None])  # (num_limited, 1)
    return floors.index_copy(0, rows, torch.maximum(floors.index_select(0, rows), kth))


def nucleus_floors(weights: Tensor, top_ps: _Floats) -> Tensor:
    """The smallest weight in each row's nucleus: the fewest ids, by falling weight, that reach top_p of the total.

    The most probable id is always kept. Holtzman et al., "The curious case of neural text degeneration", 2020.

    Args:
        weights: (num_rows, vocab_size) float32 in [0, 1], not normalised, with a positive total.
        top_ps: (num_rows,) 1 keeps all.

    Returns:
        (num_rows, 1) float32; 0 keeps all.
    """
    limited = np.flatnonzero(top_ps < 1)
    if weights.device.type == "cpu":
        floors = np.zeros((len(weights), 1), np.float32)
        for row in limited:
            floors[row] = floor_by_sorting(weights[row].numpy(), float(top_ps[row]))
        return torch.from_numpy(floors)
    found = floors_by_bisection(select_rows(weights, limited), to_device(top_ps[limited], weights.device))
    zeros = torch.zeros((len(weights), 1), device=weights.device)
    return zeros.index_copy(0, to_device(limited, weights.device), found)


def floor_by_sorting(weights: _Floats, top_p: float) -> np.float32:
    """One row's nucleus floor; the row's largest weight is 1. Sorts the whole row only if it is nearly flat."""
    target = top_p * float(weights.sum())
    for cut in (_FIRST_CUT, 0.0):
        largest = np.sort(weights[weights > cut])[::-1]
        masses = largest.cumsum(dtype=np.float64)
        if masses[-1] >= target:
            break
    index = min(int(np.searchsorted(masses, target)), len(masses) - 1)  # rounding may leave the target out of reach
    return np.float32(largest[index])


def floors_by_bisection(weights: Tensor, top_ps: Tensor) -> Tensor:
    """The rows' nucleus floors without a sort and without a host sync.

    Bisects over the bit patterns of the floats from 0 to 1, which sort as the floats do, so 30 halvings end at the
    exact weight.

    Args:
        weights: (num_rows, vocab_size) float32 in [0, 1].
        top_ps: (num_rows,) float32.

    Returns:
        (num_rows, 1) float32.
    """
    targets = weights.sum(-1, keepdim=True, dtype=torch.float64) * top_ps[:, None]
    low = torch.zeros_like(weights[:, :1], dtype=torch.int32)  # invariant: the mass from here up reaches the target
    high = torch.full_like(low, _BITS_OF_ONE + 1)
    for _ in range(_BITS_OF_ONE.bit_length()):
        middle = (low + high) >> 1
        masses = (weights * (weights >= middle.view(torch.float32))).sum(-1, keepdim=True, dtype=torch.float64)
        is_reached = masses >= targets
        low = torch.where(is_reached, middle, low)
        high = torch.where(is_reached, high, middle)
    return low.view(torch.float32)


def at_least(values: Tensor, floors: Tensor) -> Tensor:
    """1.0 where a value is kept, 0.0 elsewhere, in the shape of values."""
    return torch.ge(values, floors, out=torch.empty_like(values))


def select_rows(values: Tensor, rows: _Ints) -> Tensor:
    """The given rows, in rising order and each once; values itself, not a copy, when that is all of them."""
    if len(rows) == len(values):
        return values
    return values.index_select(0, to_device(rows, values.device))
