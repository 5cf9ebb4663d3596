"""Triton kernels of low-rank adapters: rows of several adapters shrink to their ranks, then expand to the outputs.

A piece is a few rows of one adapter: its slot from 0, the first of its rows in `order`, and how many these are. All
tiles have one shape, so a row's bits do not depend on the other rows.
"""

import triton
import triton.language as tl


@triton.jit
def shrink(
    inputs, order, pieces, weight, sums, columns, input_stride,
    DELTAS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Inputs (num_rows, input_stride) times weight (num_slots, DELTAS, RANK, columns) of each row's slot, transposed.

    sums (num_rows in order, DELTAS, RANK). A program computes a piece, its first index, one of the DELTAS, and RANKS of
    its ranks.
    """
    piece, delta = tl.program_id(0), tl.program_id(1)
    slot, first, count = tl.load(pieces + piece * 3), tl.load(pieces + piece * 3 + 1), tl.load(pieces + piece * 3 + 2)
    rows, ranks = tl.arange(0, ROWS), tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    is_row = rows < count
    sources = inputs + tl.load(order + first + rows, mask=is_row, other=0).to(tl.int64) * input_stride
    matrix = weight + (slot.to(tl.int64) * DELTAS + delta) * RANK * columns
    totals = tl.zeros([ROWS, RANKS], tl.float32)
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        is_inside = places < columns
        values = tl.load(sources[:, None] + places[None, :], mask=is_row[:, None] & is_inside[None, :], other=0.0)
        factors = tl.load(matrix + ranks[None, :] * columns + places[:, None], mask=is_inside[:, None], other=0.0)
        totals = tl.dot(values, factors, totals, input_precision="ieee")
    targets = sums + ((first + rows).to(tl.int64) * DELTAS + delta)[:, None] * RANK + ranks[None, :]
    tl.store(targets, totals.to(sums.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def expand(
    sums, order, pieces, weight, owners, outputs, num_outs, output_stride,
    DELTAS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """Add sums, as from `shrink`, times weight (num_slots, num_outs, RANK) to outputs (num_rows, output_stride).

    owners (num_slots, num_outs): which of the DELTAS an output belongs to, -1 for none. A program computes a piece, its
    first index, and OUTS outputs.
    """
    piece = tl.program_id(0)
    slot, first, count = tl.load(pieces + piece * 3), tl.load(pieces + piece * 3 + 1), tl.load(pieces + piece * 3 + 2)
    rows = tl.arange(0, ROWS)
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    is_row, is_out = rows < count, outs < num_outs
    owner = tl.load(owners + slot.to(tl.int64) * num_outs + outs, mask=is_out, other=-1)
    last = tl.max(owner, 0)
    if last >= 0:
        matrix = weight + slot.to(tl.int64) * num_outs * RANK
        totals = tl.zeros([ROWS, OUTS], tl.float32)
        for delta in range(tl.min(tl.where(owner < 0, last, owner), 0), last + 1):
            is_own = owner == delta
            for start in range(0, RANK, RANKS):
                ranks = start + tl.arange(0, RANKS)
                source = sums + ((first + rows).to(tl.int64) * DELTAS + delta)[:, None] * RANK + ranks[None, :]
                values = tl.load(source, mask=is_row[:, None], other=0.0)
                factors = tl.load(matrix + outs[None, :] * RANK + ranks[:, None], mask=is_own[None, :], other=0.0)
                totals = tl.dot(values, factors, totals, input_precision="ieee")
        places = tl.load(order + first + rows, mask=is_row, other=0).to(tl.int64)
        targets = outputs + places[:, None] * output_stride + outs[None, :]
        mask = is_row[:, None] & is_out[None, :]
        totals += tl.load(targets, mask=mask, other=0.0).to(tl.float32)
        tl.store(targets, totals.to(outputs.dtype.element_ty), mask=mask)
