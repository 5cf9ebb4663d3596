"""Argmax, top k and inverse CDF over the vocabulary, each in two levels.

Owns the rule that nobody scans or sorts a whole row of the vocabulary for one id: a row is reduced to one number per
chunk of CHUNK neighbouring ids (one streaming pass), the chunk numbers are searched, and then only the chunks that
can hold the answer. A row's result depends on that row alone, bit for bit. Nothing here waits for the device, and
ids are in range even when a row is full of NaN.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 128
"""Ids per chunk; about the square root of the usual vocabularies."""

_LOW_HALF = 0xFFFFFFFF
_LAST_UNIFORM = 1.0 - 2.0**-24


def argmax(values: Tensor) -> Tensor:
    """The lowest id among the largest values of each row.

    Args:
        values: (num_rows, vocab_size) float32.

    Returns:
        (num_rows,) int64.
    """
    chunks = _per_chunk(values, lambda part: part.amax(-1)).argmax(-1, keepdim=True)  # (num_rows, 1)
    # Past the end of the vocabulary the last id repeats, behind itself, so it changes nothing.
    members = values.gather(-1, _member_ids(chunks).clamp(max=values.shape[-1] - 1))  # (num_rows, CHUNK)
    return chunks[:, 0] * CHUNK + members.argmax(-1)


def top_values(values: Tensor, k: int) -> Tensor:
    """The k largest values of each row, largest first.

    They lie in the k chunks with the largest maxima, so only those are looked at, unless these are most of the row.

    Args:
        values: (num_rows, vocab_size) float32.
        k: At least 1, at most vocab_size.

    Returns:
        (num_rows, k) float32.
    """
    vocab_size = values.shape[-1]
    if 2 * k * CHUNK > vocab_size:
        return values.topk(k).values
    ids = _member_ids(_per_chunk(values, lambda part: part.amax(-1)).topk(k).indices)  # (num_rows, k * CHUNK)
    candidates = values.gather(-1, ids.clamp(max=vocab_size - 1))
    return candidates.masked_fill_(ids >= vocab_size, float("-inf")).topk(k).values


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row with their ids, largest first and the lower id first among equals.

    The order is total: a larger k gives the same entries with more behind them.

    Args:
        values: (num_rows, vocab_size) float32.
        k: At least 1, at most vocab_size.

    Returns:
        (num_rows, k) float32 values and (num_rows, k) int64 ids.
    """
    vocab_size = values.shape[-1]
    maxima = _per_chunk(values, lambda part: part.amax(-1))  # (num_rows, num_chunks)
    numbers = torch.arange(maxima.shape[-1], device=values.device)
    chunks = _ids_of(_ranks(maxima, numbers).topk(min(k, maxima.shape[-1])).values)
    ids = _member_ids(chunks)  # (num_rows, num_candidates)
    ranks = _ranks(values.gather(-1, ids.clamp(max=vocab_size - 1)), ids)
    ranks.masked_fill_(ids >= vocab_size, torch.iinfo(torch.int64).min)
    top_ids = _ids_of(ranks.topk(k).values)
    return values.gather(-1, top_ids), top_ids


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first id in vocabulary order whose cumulated weight exceeds uniform * total, so never one of weight 0.

    Args:
        weights: (num_rows, vocab_size) float32 >= 0, not normalised, with a positive total.
        uniforms: (num_rows,) float32 in [0, 1).

    Returns:
        (num_rows,) int64.
    """
    sums = _per_chunk(weights, lambda part: part.sum(-1))
    cumulated = torch.nn.functional.pad(sums.cumsum(-1, dtype=torch.float64), (1, 0))  # (num_rows, num_chunks + 1)
    targets = uniforms.to(torch.float64)[:, None] * cumulated[:, -1:]
    chunks = _first_above(cumulated[:, 1:], targets)
    # Past the end of the vocabulary the last id repeats; a number that falls there falls on the last id.
    ids = _member_ids(chunks).clamp(max=weights.shape[-1] - 1)
    inner = weights.gather(-1, ids).cumsum(-1, dtype=torch.float64)  # (num_rows, CHUNK)
    # The chunk's float32 sum may exceed the float64 one by its rounding; the rest must stay below the latter.
    rests = torch.minimum(targets - cumulated.gather(-1, chunks), inner[:, -1:] * _LAST_UNIFORM)
    return ids.gather(-1, _first_above(inner, rests))[:, 0]


def _per_chunk(values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce the last dimension chunk by chunk: (num_rows, vocab_size) -> (num_rows, num_chunks)."""
    num_whole, num_left = divmod(values.shape[-1], CHUNK)
    whole = reduce(values[:, : num_whole * CHUNK].view(len(values), num_whole, CHUNK))
    if num_left == 0:
        return whole
    return torch.cat((whole, reduce(values[:, num_whole * CHUNK :])[:, None]), -1)


def _member_ids(chunks: Tensor) -> Tensor:
    """(num_rows, n) chunk numbers -> (num_rows, n * CHUNK) ids; the last chunk's may pass the vocabulary's end."""
    return (chunks[:, :, None] * CHUNK + torch.arange(CHUNK, device=chunks.device)).flatten(1)


def _first_above(cumulated: Tensor, targets: Tensor) -> Tensor:
    """(num_rows, 1) first index whose value exceeds the target; the last one if NaN leaves none."""
    return torch.searchsorted(cumulated.contiguous(), targets, right=True).clamp(max=cumulated.shape[-1] - 1)


def _ranks(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys, all different, that sort by value and then by falling id."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats sort backwards as integers
    return (ordered.to(torch.int64) << 32) | (_LOW_HALF - ids)


def _ids_of(ranks: Tensor) -> Tensor:
    return _LOW_HALF - (ranks & _LOW_HALF)
