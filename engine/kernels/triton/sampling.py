"""Weft's own sampler for CUDA, in Triton: two launches per step, five in a graph or if a row has filters.

It computes what `pick_ids` computes; see `sampling_kernels` for how. Its exponential and the order of its sums differ
in the last bits. So an id may differ if a uniform number, or the edge of a nucleus, is within 1e-5 of the border
between two ids. A row's id does not depend on the other rows. Nothing waits for the device.
"""

import numpy as np
import torch
import triton
from torch import Tensor
from typing_extensions import override

from weft.engine.batch import Floats, RowMasks, SamplingBatch
from weft.engine.device import to_device
from weft.engine.kernels.triton import sampling_jit as kernels
from weft.engine.kernels.triton.sampling_rows_jit import BINS
from weft.engine.sampling.sampler import GraphSampler

_PART, _CHUNK = 4096, 128
_TILE = 2048  # listed logits that a search reads at a time; lists of no more than that are not narrowed
_NARROWING_PROGRAMS = 8  # for a row: each reads the row's histogram


class TritonSampler:
    """Implements `PickIds`."""

    def __call__(self, logits: Tensor, batch: SamplingBatch, masks: RowMasks | None) -> Tensor:
        """Logits (num_rows, vocab_size) float32, contiguous; overwrites those of masked rows."""
        parameters = to_device(pack_parameters(batch, masks, logits.size(1)), logits.device)
        bits = None
        if masks is not None:
            bits = to_device(masks.bits.view(np.uint8), logits.device).view(torch.int32)
        return launch(logits, parameters, bits, has_filters(batch))


class TritonGraphSampler(GraphSampler):
    """The same sampler in a CUDA graph, without masks. Rows without filters end the last two launches at once."""

    def __init__(self, vocab_size: int) -> None:
        """Take the number of logits per row."""
        self._vocab_size = vocab_size

    @override
    def can_sample(self, batch: SamplingBatch) -> bool:
        return True

    @override
    def parameters(self, batch: SamplingBatch, num_rows: int) -> Floats:
        parameters = pack_parameters(batch, None, self._vocab_size)
        return np.pad(parameters, ((0, 0), (0, num_rows - parameters.shape[1])), "edge")

    @override
    def sample(self, logits: Tensor, parameters: Tensor) -> Tensor:
        return launch(logits, parameters, None, is_filtered=True)


def has_filters(batch: SamplingBatch) -> bool:
    """Whether any row has top-k, top-p or min-p."""
    return bool(((batch.top_ks > 0) | (batch.top_ps < 1) | (batch.min_ps > 0)).any())


def pack_parameters(batch: SamplingBatch, masks: RowMasks | None, vocab_size: int) -> Floats:
    """The parameters of all rows: (6, num_rows) float32, in the order of `sampling_kernels`."""
    mask_rows = np.full(len(batch.temperatures), -1)
    if masks is not None:
        mask_rows[masks.rows] = np.arange(len(masks.rows))
    is_random = batch.temperatures > 0
    temperatures = np.where(is_random, batch.temperatures, np.float32(1))
    with np.errstate(over="ignore"):
        inverses = np.minimum(1 / temperatures, np.finfo(np.float32).max) * is_random
    top_ks = np.where(batch.top_ks < vocab_size, batch.top_ks, 0)
    return np.stack((inverses, batch.min_ps, top_ks, batch.top_ps, batch.uniforms, mask_rows)).astype(np.float32)


def launch(logits: Tensor, parameters: Tensor, bits: Tensor | None, is_filtered: bool) -> Tensor:
    """Queue the kernels. They read and write device memory only, so that a CUDA graph may hold them.

    Args:
        logits: (num_rows, vocab_size) float32, contiguous; those of masked rows are overwritten.
        parameters: See `pack_parameters`.
        bits: (n, vocab_size / 32, rounded up) int32, see `RowMasks`; None if no row has a mask.
        is_filtered: Whether a row may have top-k, top-p or min-p.

    Returns:
        (num_rows,) int64.
    """
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _PART)
    padded = max(triton.next_power_of_2(num_parts), 16)
    chunk_bests = logits.new_empty(num_rows, num_parts, _PART // _CHUNK)
    part_bests, part_masses = logits.new_empty(num_rows, num_parts), logits.new_empty(num_rows, num_parts)
    part_best_ids = logits.new_empty(num_rows, num_parts, dtype=torch.int32)
    summaries = (chunk_bests, part_bests, part_best_ids, part_masses)
    token_ids = logits.new_empty(num_rows, dtype=torch.int64)
    floors, totals = logits.new_empty(num_rows), logits.new_empty(num_rows, dtype=torch.float64)
    bins = logits.new_empty(num_rows, 2 * BINS.value, dtype=torch.int64)
    sizes = torch.empty_like(floors, dtype=torch.int32)
    if bits is None:
        bits = parameters.view(torch.int32)  # not read if no row has a mask
    grid = (num_rows, num_parts)
    num_words = triton.cdiv(vocab_size, 32)
    kernels.summarise[grid](logits, parameters, bits, *summaries, vocab_size, num_words, _PART, _CHUNK, num_warps=8)
    results = (token_ids, floors, totals, bins, sizes, vocab_size, num_parts)
    kernels.decide[(num_rows,)](logits, parameters, *summaries, *results, _PART, _CHUNK, padded, num_warps=8)
    if is_filtered:
        lists = logits.new_empty(num_rows, num_parts, _PART)
        counts, sure_masses = torch.empty_like(part_best_ids), torch.empty_like(part_masses)
        listed = (sizes, lists, counts, sure_masses)
        apart = totals.new_empty(num_rows, 2)
        shape = (vocab_size, num_parts, _PART, padded)
        kernels.collect[grid](logits, parameters, floors, part_bests, bins, *listed, *shape, num_warps=8)
        few = (num_rows, min(num_parts, _NARROWING_PROGRAMS))
        row = (parameters, totals, part_bests, bins, *listed, apart)
        kernels.narrow[few](*row, *shape[1:], _TILE, num_warps=8)
        found = (logits, parameters, floors, totals, part_bests, *listed, apart, token_ids)
        kernels.draw[(num_rows,)](*found, *shape, max(_TILE // padded, 8), _TILE, num_warps=8)
    return token_ids
