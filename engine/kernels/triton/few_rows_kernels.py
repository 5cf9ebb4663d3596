"""Triton kernel of a product with few rows: each weight is read once, straight into registers.

Such a product takes as long as its weights take to arrive. So all threads of a program lie along the inner dimension,
in loads of 16 bytes, and a tile of weights is on its way while they multiply the one before it. The first tile depends
on no other kernel. With `dependent_launch` it is loaded, and more are fetched into the L2 cache, while the kernel
before still runs.
"""

import triton
import triton.language as tl

from weft.engine.kernels.triton.dependent_launch import let_next_start, wait_for_previous
from weft.engine.kernels.triton.layer_kernels import activated


@triton.jit
def multiply(
    inputs, weight, bias, norm_weight, outputs, num_rows, num_outs, input_stride, output_stride, eps,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, ADDS: tl.constexpr, ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCK: tl.constexpr,
    USES_DOT: tl.constexpr, PREFETCH: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A few rows of inputs (num_rows, COLUMNS) times weight, transposed; OUTS rows of weight per program.

    The steps, each if its flag says so:

    1. HAS_NORM: RMSNorm of the inputs, times norm_weight (COLUMNS,). The scale of a row is a factor of all its outputs,
       so it is applied at the end, and nothing is read twice.
    2. The product, summed in float32. HAS_BIAS adds bias, one value for each row of weight.
    3. ACTIVATION, "" for none: weight is (2 * num_outs, COLUMNS), gate first; outputs are activation(gate) * up.
    4. ADDS adds to the outputs instead of writing them. Values are rounded once, as they are written.

    ROWS >= num_rows; COLUMNS need not be a multiple of BLOCK, nor num_outs of what a program computes.
    """
    let_next_start(IS_DEPENDENT)
    IS_GATED: tl.constexpr = ACTIVATION != ""
    NUM: tl.constexpr = OUTS // 2 if IS_GATED else OUTS
    written = tl.program_id(0) * NUM + tl.arange(0, NUM)
    places = tl.arange(0, OUTS)
    if IS_GATED:  # gate and up in turn
        outs = tl.minimum(tl.program_id(0) * NUM + places // 2, num_outs - 1) + places % 2 * num_outs
    else:
        outs = tl.minimum(tl.program_id(0) * NUM + places, num_outs - 1)
    columns = tl.arange(0, BLOCK)
    weights = weight + outs.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    tile = _load_tile(weights, columns, 0, COLUMNS)
    if PREFETCH > 0:
        _prefetch(weight + BLOCK, num_outs, COLUMNS, OUTS, IS_GATED, PREFETCH)
    if HAS_BIAS:
        biases = tl.load(bias + outs).to(tl.float32)
    wait_for_previous(IS_DEPENDENT)
    rows = tl.arange(0, ROWS)
    sources = inputs + tl.minimum(rows, num_rows - 1)[:, None] * input_stride + columns[None, :]
    sums = tl.zeros([BLOCK // 128, OUTS, ROWS] if USES_DOT else [ROWS, OUTS, BLOCK // 8], tl.float32)
    squares = tl.zeros([ROWS, BLOCK // 8], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        next_tile = _load_tile(weights, columns, start + BLOCK, COLUMNS)
        is_inside = (start + columns < COLUMNS)[None, :]
        values = tl.load(sources + start, mask=is_inside, other=0.0)
        if HAS_NORM:
            wide = values.to(tl.float32)
            squares += tl.sum(tl.reshape(wide * wide, (ROWS, BLOCK // 8, 8)), axis=2)
            wide *= tl.load(norm_weight + start + columns[None, :], mask=is_inside, other=0.0).to(tl.float32)
            values = wide.to(tile.dtype) if USES_DOT else wide
        sums = _add_product(sums, tile, values, ROWS, OUTS, BLOCK, USES_DOT)
        tile = next_tile
    results = tl.trans(tl.sum(sums, axis=0)) if USES_DOT else tl.sum(sums, axis=2)  # (ROWS, OUTS)
    if HAS_NORM:
        results *= tl.rsqrt(tl.sum(squares, axis=1) / COLUMNS + eps)[:, None]
    if HAS_BIAS:
        results += biases[None, :]
    if IS_GATED:
        gate, up = tl.split(tl.reshape(results, (ROWS, OUTS // 2, 2)))
        results = activated(gate, ACTIVATION) * up
    targets = outputs + rows[:, None] * output_stride + written[None, :]
    is_written = (rows < num_rows)[:, None] & (written < num_outs)[None, :]
    if ADDS:
        results += tl.load(targets, mask=is_written, other=0.0).to(tl.float32)
    tl.store(targets, results.to(outputs.dtype.element_ty), mask=is_written)


@triton.jit
def _load_tile(weights, columns, start, COLUMNS: tl.constexpr):
    """The weights at columns from start on; they are not needed again, so they leave the caches first."""
    is_inside = (start + columns < COLUMNS)[None, :]
    return tl.load(weights + start, mask=is_inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _add_product(
    sums, tile, values, ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCK: tl.constexpr, USES_DOT: tl.constexpr
):
    """Add the products of a tile (OUTS, BLOCK) of weights and values (ROWS, BLOCK); no thread waits for another's sum.

    Without USES_DOT a thread sums its 8 neighbouring columns, 16 bytes of weights: sums is (ROWS, OUTS, BLOCK // 8).
    With it, a warp sums its own 128 columns on tensor cores: sums is (BLOCK // 128, OUTS, ROWS).
    """
    if USES_DOT:
        left = tl.permute(tl.reshape(tile, (OUTS, BLOCK // 128, 128)), (1, 0, 2))
        right = tl.permute(tl.reshape(values, (ROWS, BLOCK // 128, 128)), (1, 2, 0))
        sums = tl.dot(left, right, sums)
    else:
        left = tl.reshape(tile.to(tl.float32), (1, OUTS, BLOCK // 8, 8))
        sums += tl.sum(left * tl.reshape(values.to(tl.float32), (ROWS, 1, BLOCK // 8, 8)), axis=3)
    return sums


@triton.jit
def _prefetch(
    weight, num_outs, COLUMNS: tl.constexpr, OUTS: tl.constexpr, IS_GATED: tl.constexpr, PREFETCH: tl.constexpr
):
    """Ask for PREFETCH columns of each row of the program, which come to the L2 cache, and wait for nothing.

    One thread asks for a row. Compute capability 9.0 has this. num_outs >= OUTS, and BLOCK + PREFETCH <= COLUMNS, so
    that all of it is memory of the weights.
    """
    NUM: tl.constexpr = OUTS // 2 if IS_GATED else OUTS
    first = tl.minimum(tl.program_id(0) * NUM, num_outs - NUM).to(tl.int64)
    for place in tl.static_range(OUTS):
        row = first + place // 2 + place % 2 * num_outs if IS_GATED else first + place
        tl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, $2; mov.u32 $0, t;
            @p cp.async.bulk.prefetch.L2.global [$1], $3; }""",
            "=r,l,r,r",
            [(weight + row * COLUMNS).to(tl.int64), tl.full([], place, tl.int32), tl.full([], 2 * PREFETCH, tl.int32)],
            tl.int32,
            False,
            1,
        )
