"""Triton kernels of matrix products: for the rows of all experts of a layer, packed and fp8 matrices, and adapters.

Rows of several experts lie in the order of their experts. How many each has, only the device knows, so there are
programs for the worst case, and those without rows end at once.
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


# Matrices of 4 and 8 bits. A row of a matrix is bytes. With 4 bits, the low halves of a run of RUN bytes are RUN
# inputs, the high halves the next RUN: so both are neighbouring columns of the inputs, and nothing is interleaved. A
# weight is (code - zero) * scale, computed in float32 and rounded once to the type of the inputs, times a factor of its
# output.


@triton.jit(do_not_specialize=["num_rows"])
def multiply_packed(
    inputs, codes, scales, zeros, factors, bias, outputs, ends, num_rows, num_experts, num_outs, columns, row_bytes,
    num_groups, group, input_stride, output_stride,
    KIND: tl.constexpr, RUN: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, OCTETS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Inputs (num_rows, columns) times the packed matrix, transposed; OUTS outputs of ROWS rows per program.

    codes (num_experts, num_outs, row_bytes); scales and zeros (num_experts, num_outs, num_groups), of `group` inputs
    each; factors and bias (num_experts, num_outs). With EXPERTS, a power of 2 >= num_experts, rows are of several
    experts, see `find_rows`; with 0 there is one matrix. A program reads OCTETS bytes of a row of the matrix at a time.
    Each of SLICES warps sums its own part of these, and the sums are added in this order at the end. The order depends
    on the matrix and ROWS alone. ADDS adds to the outputs instead of writing them; values are rounded as they are
    written.
    """
    expert, first, stop = find_rows(ends, num_rows, num_experts, EXPERTS, ROWS)
    if expert < num_experts:
        rows, outs = tl.arange(0, ROWS), tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        is_row, is_out = rows < stop - first, outs < num_outs
        places = expert.to(tl.int64) * num_outs + tl.minimum(outs, num_outs - 1)
        octets = tl.arange(0, OCTETS)
        sources = inputs + (first.to(tl.int64) + rows)[:, None] * input_stride
        PER_OCTET: tl.constexpr = 2 if KIND == "int4" or KIND == "fp4" else 1
        sums = tl.zeros([SLICES, OUTS, ROWS] if SLICES > 1 else [OUTS, ROWS], tl.float32)
        for start in range(0, row_bytes, OCTETS):
            tile = tl.load(
                codes + places[:, None] * row_bytes + (start + octets)[None, :],
                mask=(start + octets < row_bytes)[None, :],
                other=0,
            )
            for half in tl.static_range(PER_OCTET):
                weights = _dequantized(
                    tile, scales, zeros, places, start, half, num_groups, group, KIND, RUN, HAS_ZEROS, OUTS, OCTETS
                ).to(inputs.dtype.element_ty)
                taken = start * PER_OCTET + (octets // RUN * PER_OCTET + half) * RUN + octets % RUN
                values = tl.load(sources + taken[None, :], mask=is_row[:, None] & (taken < columns)[None, :], other=0.0)
                if SLICES > 1:
                    left = tl.permute(tl.reshape(weights, (OUTS, SLICES, OCTETS // SLICES)), (1, 0, 2))
                    right = tl.permute(tl.reshape(values, (ROWS, SLICES, OCTETS // SLICES)), (1, 2, 0))
                    sums = tl.dot(left, right, sums)
                else:
                    sums = tl.dot(weights, tl.trans(values), sums)
        results = (tl.sum(sums, axis=0) if SLICES > 1 else sums) * tl.load(factors + places)[:, None]
        if HAS_BIAS:
            results += tl.load(bias + places).to(tl.float32)[:, None]
        targets = outputs + (first.to(tl.int64) + rows)[None, :] * output_stride + outs[:, None]
        is_written = is_row[None, :] & is_out[:, None]
        if ADDS:
            results += tl.load(targets, mask=is_written, other=0.0).to(tl.float32)
        tl.store(targets, results.to(outputs.dtype.element_ty), mask=is_written)


@triton.jit(do_not_specialize=["first", "num_rows"])
def unpack(
    codes, scales, zeros, factors, ids, outputs, first, num_rows, columns, row_bytes, num_groups, group,
    KIND: tl.constexpr, RUN: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_IDS: tl.constexpr,
    OUTS: tl.constexpr, OCTETS: tl.constexpr,
):  # fmt: skip
    """Rows of the matrix, as outputs (num_rows, columns): those of ids (num_rows,) int64, or from `first` on."""
    rows, octets = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, OCTETS)
    is_row, start = rows < num_rows, tl.program_id(1) * OCTETS
    places = tl.where(is_row, first + rows, 0).to(tl.int64)
    if HAS_IDS:
        places = tl.load(ids + rows, mask=is_row, other=0)
    is_inside = (start + octets < row_bytes)[None, :]
    tile = tl.load(codes + places[:, None] * row_bytes + (start + octets)[None, :], mask=is_inside, other=0)
    PER_OCTET: tl.constexpr = 2 if KIND == "int4" or KIND == "fp4" else 1
    for half in tl.static_range(PER_OCTET):
        weights = _dequantized(
            tile, scales, zeros, places, start, half, num_groups, group, KIND, RUN, HAS_ZEROS, OUTS, OCTETS
        )
        weights *= tl.load(factors + places)[:, None]
        taken = start * PER_OCTET + (octets // RUN * PER_OCTET + half) * RUN + octets % RUN
        targets = outputs + rows.to(tl.int64)[:, None] * columns + taken[None, :]
        is_written = is_row[:, None] & (taken < columns)[None, :] & is_inside
        tl.store(targets, weights.to(outputs.dtype.element_ty), mask=is_written)


@triton.jit
def _dequantized(
    tile, scales, zeros, places, start, half, num_groups, group,
    KIND: tl.constexpr, RUN: tl.constexpr, HAS_ZEROS: tl.constexpr, OUTS: tl.constexpr, OCTETS: tl.constexpr,
):  # fmt: skip
    """(OUTS, OCTETS) float32: one half of the bytes from `start` on, of the rows `places`; scales are read by runs."""
    PER_OCTET: tl.constexpr = 2 if KIND == "int4" or KIND == "fp4" else 1
    runs = start // RUN + tl.arange(0, OCTETS // RUN)
    groups = tl.minimum((runs * PER_OCTET + half) * RUN // group, num_groups - 1)
    at = places[:, None] * num_groups + groups[None, :]
    steps = tl.load(scales + at)
    if scales.dtype.element_ty == tl.uint8:  # exponents
        steps = (steps.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        steps = steps.to(tl.float32)
    bits = tile.to(tl.int32)
    if KIND == "int4":  # 2 ** 23 and the integer, as float32: faster than a conversion
        values = (bits >> half * 4 & 15 | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    elif KIND == "int8":
        values = tile.to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == "fp4":  # as float16, whose exponents count from 14 more
        bits = bits >> half * 4
        values = ((bits & 7) << 9 | (bits & 8) << 12).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        steps *= 16384.0
    else:  # e4m3; sm_80 has no instruction for it
        values = ((bits & 127) << 7 | (bits & 128) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        steps *= 256.0
    values = tl.reshape(values, (OUTS, OCTETS // RUN, RUN))
    if HAS_ZEROS:
        values -= tl.load(zeros + at).to(tl.float32)[:, :, None]
    return tl.reshape(values * steps[:, :, None], (OUTS, OCTETS))


@triton.jit
def round_rows(inputs, outputs, scales, size, num_groups, input_stride, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """One row of inputs (num_rows, size) in e4m3, with the scale of each group: its largest value becomes 448."""
    row = tl.program_id(0).to(tl.int64)
    columns, groups = tl.arange(0, BLOCK), tl.arange(0, BLOCK // GROUP)
    is_inside = columns < size
    values = tl.load(inputs + row * input_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    values = tl.reshape(values, (BLOCK // GROUP, GROUP))
    steps = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-12) / 448.0
    values = tl.reshape(values / steps[:, None], (BLOCK,))
    values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    tl.store(outputs + row * size + columns, values.to(outputs.dtype.element_ty), mask=is_inside)
    tl.store(scales + row * num_groups + groups, steps, mask=groups < num_groups)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_fp8(
    inputs, input_scales, weight, scales, bias, outputs, num_rows, num_outs, size,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Inputs (num_rows, size) times weight (num_outs, size), transposed; both e4m3 with scales of GROUP inputs.

    input_scales (num_rows, size / GROUP); scales (size / GROUP, num_outs). The sum of a group is scaled before it
    is added to others: tensor cores sum e4m3 with fewer digits than float32 has.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    is_row, is_out, places = rows < num_rows, outs < num_outs, tl.arange(0, GROUP)
    sources = inputs + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * size + places[None, :]
    weights = weight + tl.minimum(outs, num_outs - 1).to(tl.int64)[None, :] * size + places[:, None]
    sums = tl.zeros([ROWS, OUTS], tl.float32)
    for group in range(size // GROUP):
        products = tl.dot(tl.load(sources + group * GROUP), tl.load(weights + group * GROUP))
        steps = tl.load(input_scales + rows * (size // GROUP) + group, mask=is_row, other=0.0)
        sums += products * steps[:, None] * tl.load(scales + group * num_outs + outs, mask=is_out, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)[None, :]
    targets = outputs + rows.to(tl.int64)[:, None] * num_outs + outs[None, :]
    tl.store(targets, sums.to(outputs.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


# Low-rank adapters: rows of several adapters shrink to their ranks, then expand to the outputs. A piece is a few rows
# of one adapter: its slot from 0, the first of its rows in `order`, and how many these are. All tiles have one shape,
# so a row's bits do not depend on the other rows.


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
