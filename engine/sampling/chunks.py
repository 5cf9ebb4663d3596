"""Finds the top k ids of each row in two levels: first chunks of the vocabulary, then their ids.

No row is sorted for a few ids. One streaming pass reduces it to one number per chunk of CHUNK neighbouring ids. Then
only the chunks that can hold the answer are looked at. A row's result depends on that row alone, bit for bit. Nothing
here waits for the device. Ids are in range even when a row is full of NaN.
"""

import torch
from torch import Tensor

CHUNK = 128
"""Ids per chunk; about the square root of the usual vocabularies."""

_LOW_HALF = 0xFFFFFFFF


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
    maxima = _maxima(values)  # (num_rows, num_chunks)
    numbers = torch.arange(maxima.shape[-1], device=values.device)
    chunks = _ids_of(_ranks(maxima, numbers).topk(min(k, maxima.shape[-1])).values)
    ids = _member_ids(chunks)  # (num_rows, num_candidates)
    ranks = _ranks(values.gather(-1, ids.clamp(max=vocab_size - 1)), ids)
    ranks.masked_fill_(ids >= vocab_size, torch.iinfo(torch.int64).min)
    top_ids = _ids_of(ranks.topk(k).values)
    return values.gather(-1, top_ids), top_ids


def _maxima(values: Tensor) -> Tensor:
    """(num_rows, vocab_size) -> (num_rows, num_chunks), the largest value of each chunk."""
    num_whole, num_left = divmod(values.shape[-1], CHUNK)
    whole = values[:, : num_whole * CHUNK].view(len(values), num_whole, CHUNK).amax(-1)
    return torch.cat((whole, values[:, num_whole * CHUNK :].amax(-1, keepdim=True)), -1) if num_left else whole


def _member_ids(chunks: Tensor) -> Tensor:
    """(num_rows, n) chunk numbers -> (num_rows, n * CHUNK) ids; the last chunk's may pass the vocabulary's end."""
    return (chunks[:, :, None] * CHUNK + torch.arange(CHUNK, device=chunks.device)).flatten(1)


def _ranks(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys, all different, that sort by value and then by falling id."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats sort backwards as integers
    return (ordered.to(torch.int64) << 32) | (_LOW_HALF - ids)


def _ids_of(ranks: Tensor) -> Tensor:
    return _LOW_HALF - (ranks & _LOW_HALF)
