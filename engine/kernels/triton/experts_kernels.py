"""Triton kernels of a layer of experts: one product for the rows of all experts, and the sum over a token's experts.

Rows lie in the order of their experts. How many each has, only the device knows, so there are programs for the worst
case, and those without rows end at once.
"""

import triton
import triton.language as tl


@triton.jit
def find_rows(ends, num_rows, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Of a program its expert, which is none if it is num_experts, the first of its rows, and where the expert's end.

    ends (num_experts,): where the rows of an expert end. EXPERTS >= num_experts is a power of 2; with 0 there is one
    expert, of all rows, and ends is not read.
    """
    block = tl.program_id(0)
    if EXPERTS == 0:
        expert, first, stop = block * 0, block * ROWS, num_rows
    else:
        numbers = tl.arange(0, EXPERTS)
        is_expert = numbers < num_experts
        stops = tl.load(ends + numbers, mask=is_expert, other=0).to(tl.int32)
        starts = tl.load(ends + numbers - 1, mask=is_expert & (numbers > 0), other=0).to(tl.int32)
        blocks = tl.where(is_expert, tl.cdiv(stops - starts, ROWS), 0)
        last_blocks = tl.cumsum(blocks, 0)
        expert = tl.sum((is_expert & (last_blocks <= block)).to(tl.int32), 0)
        is_own = numbers == expert
        first = tl.sum(tl.where(is_own, starts + (block - last_blocks + blocks) * ROWS, 0), 0)
        stop = tl.sum(tl.where(is_own, stops, 0), 0)
    return expert, first, stop


@triton.jit
def multiply_groups(
    inputs, weight, bias, outputs, ends, num_experts, num_outs, columns,
    HAS_BIAS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Inputs (num_rows, columns) times the weight of each row's expert, transposed; plus its bias if HAS_BIAS.

    weight (num_experts, num_outs, columns); bias (num_experts, num_outs); for ends and EXPERTS see `find_rows`. A
    program computes ROWS rows of one expert and OUTS outputs; its first index is that of the rows, of which there are
    at most num_rows // ROWS + num_experts.
    """
    expert, first, stop = find_rows(ends, 0, num_experts, EXPERTS, ROWS)
    if expert < num_experts:
        rows = tl.arange(0, ROWS)
        outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        is_row, is_out = rows < stop - first, outs < num_outs
        sources, targets = inputs + first.to(tl.int64) * columns, outputs + first.to(tl.int64) * num_outs
        matrix = weight + expert.to(tl.int64) * num_outs * columns
        sums = tl.zeros([ROWS, OUTS], tl.float32)
        for start in range(0, columns, BLOCK):
            places = start + tl.arange(0, BLOCK)
            is_inside = places < columns
            values = tl.load(
                sources + rows[:, None] * columns + places[None, :],
                mask=is_row[:, None] & is_inside[None, :],
                other=0.0,
            )
            factors = tl.load(
                matrix + outs[None, :] * columns + places[:, None], mask=is_out[None, :] & is_inside[:, None], other=0.0
            )
            sums = tl.dot(values, factors, sums, input_precision="ieee")
        if HAS_BIAS:
            sums += tl.load(bias + expert * num_outs + outs, mask=is_out, other=0.0).to(tl.float32)[None, :]
        targets += rows[:, None] * num_outs + outs[None, :]
        tl.store(targets, sums.to(outputs.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


@triton.jit
def mix(outputs, places, shares, residual, size, residual_stride, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Add to a token of residual (num_tokens, residual_stride) its CHOSEN experts' outputs, each times its share.

    places (num_tokens, CHOSEN): the rows of outputs (num_rows, size). A program computes BLOCK values of one token.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    sums = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(CHOSEN):
        place = tl.load(places + token * CHOSEN + index).to(tl.int64)
        values = tl.load(outputs + place * size + columns, mask=is_inside, other=0.0)
        sums += tl.load(shares + token * CHOSEN + index) * values.to(tl.float32)
    target = residual + token * residual_stride + columns
    sums += tl.load(target, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(target, sums.to(residual.dtype.element_ty), mask=is_inside)
