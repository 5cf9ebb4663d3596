"""Weft's own `ApplyPenalties` for CUDA: one copy to the device and one launch, whatever the penalties are.

Follows `apply_penalties` operation by operation, each rounded as torch rounds it, so that the two agree to the last
bit. One program edits all ids of an entry, and no program touches another row. Nothing waits for the device.

Packed is what the kernel reads, in int32: columns (NUM_COLUMNS, num_penalised) in the order of the names below, of
which penalties are the bits of a float32; then all ids, then all counts.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weft.engine.step.batch import PenaltyBatch
from weft.engine.step.transfer import to_device

_TILE = 2048
"""Ids that a program edits at a time."""

_ROW = tl.constexpr(0)
_START = tl.constexpr(1)
_END = tl.constexpr(2)
_SOURCE = tl.constexpr(3)
"""The row of the previous step that sampled the placeholder, -1 for none."""
_REPETITION = tl.constexpr(4)
_PRESENCE = tl.constexpr(5)
_FREQUENCY = tl.constexpr(6)
_NUM_COLUMNS = tl.constexpr(7)


def apply_penalties(logits: torch.Tensor, penalties: PenaltyBatch, previous_token_ids: torch.Tensor | None) -> None:
    """See `ApplyPenalties`."""
    if len(penalties.placeholders.targets):
        assert previous_token_ids is not None, "placeholders need the ids of the previous step"
    else:
        previous_token_ids = logits.new_empty(1, dtype=torch.int64)  # which is not read
    packed = to_device(pack(penalties), logits.device)
    grid, sizes = (len(penalties.rows),), (logits.size(1), len(penalties.ids))
    # Without fused multiply-adds, which round once where torch rounds twice.
    penalise[grid](logits, packed, previous_token_ids, *sizes, _TILE, num_warps=8, enable_fp_fusion=False)


def pack(penalties: PenaltyBatch) -> npt.NDArray[np.int32]:
    """See the module's head; ids and counts are far below 2**31."""
    sources = np.full(len(penalties.rows), -1)
    sources[penalties.placeholders.targets] = penalties.placeholders.rows
    factors = (penalties.repetition, penalties.presence, penalties.frequency)
    columns = (
        penalties.rows,
        penalties.starts[:-1],
        penalties.starts[1:],
        sources,
        *(f.view(np.int32) for f in factors),
    )
    return np.concatenate((*columns, penalties.ids, penalties.counts), dtype=np.int32, casting="same_kind")


@triton.jit
def _column(packed, index: tl.constexpr):
    return tl.load(packed + index * tl.num_programs(0) + tl.program_id(0))


@triton.jit
def _penalised(logits, counts, repetition, presence, frequency):
    logits = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    return logits - presence * (counts > 0).to(tl.float32) - frequency * counts.to(tl.float32)


@triton.jit(do_not_specialize=["num_ids"])  # which would compile it again for numbers that 16 divides
def penalise(logits, packed, previous_token_ids, vocab_size, num_ids, TILE: tl.constexpr):
    """Grid (num_penalised,). The placeholder's id is left out of the tiles and edited last, when its count is known."""
    ids_at = packed + _NUM_COLUMNS * tl.num_programs(0)
    repetition = _column(packed, _REPETITION).to(tl.float32, bitcast=True)
    presence = _column(packed, _PRESENCE).to(tl.float32, bitcast=True)
    frequency = _column(packed, _FREQUENCY).to(tl.float32, bitcast=True)
    source = _column(packed, _SOURCE)
    sampled_id = tl.load(previous_token_ids + source, mask=source >= 0, other=-1)
    row = logits + _column(packed, _ROW).to(tl.int64) * vocab_size
    start, end = _column(packed, _START), _column(packed, _END)
    known_counts = tl.zeros((TILE,), tl.int32)
    while start < end:
        places = start + tl.arange(0, TILE)
        ids = tl.load(ids_at + places, mask=places < end, other=-1)
        counts = tl.load(ids_at + num_ids + places, mask=places < end, other=0)
        known_counts += tl.where(ids == sampled_id, counts, 0)
        is_edited = (places < end) & (ids != sampled_id)
        values = tl.load(row + ids, mask=is_edited, other=0.0)
        tl.store(row + ids, _penalised(values, counts, repetition, presence, frequency), mask=is_edited)
        start += TILE
    if sampled_id >= 0:
        value, count = tl.load(row + sampled_id), tl.sum(known_counts) + 1
        tl.store(row + sampled_id, _penalised(value, count, repetition, presence, frequency))
