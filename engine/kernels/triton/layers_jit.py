"""Triton kernels of plain layers, and dependent launch, by which a kernel starts while the one before it still runs.

The kernels are those between two matrices (norm; QK-norm, rotary embedding and K/V write; activation) and the product
with few rows. They compute in float32 and round once, at the end.

Compute capability 9.0 has programmatic dependent launch. Without it, each of the ten kernels of a layer waits until the
one before has left the GPU, and no memory is read meanwhile. Two instructions govern it:

- `let_next_start`: the next kernel may start once every program of this one has said so, or has ended. All programs
  run by then, so the next kernel takes no place from them. It is right to say so at once.
- `wait_for_previous`: waits until the kernel before has ended and its writes are visible. A kernel that was launched
  in the ordinary way, such as torch's and cuBLAS's, starts only then, and ends likewise.

What keeps it right, for kernels A, B, C in stream order:

1. Every program waits, even one without work, and before it ends. So B ends after A has ended, and who waits for B has
   waited for A, too: the order of the stream holds for all that comes after the wait, at any distance.
2. Read after write: what an earlier kernel writes is read after the wait. Only weights are read before it. They are
   there before the step, and a step begins with ordinary kernels, which have waited for all before them.
3. Write after read: nothing is written before the wait. So C may write what A reads, be it the residual or memory that
   the allocator has taken from A's tensors and given to C.

The kernels of a CUDA graph that is recorded from such launches depend on each other in the same way.
"""

from typing import TypedDict

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_CAPABILITY = 9, 0


class LaunchOptions(TypedDict, total=False):
    """Arguments of a launch: IS_DEPENDENT of the kernel, and the attribute, which Triton's interpreter refuses."""

    IS_DEPENDENT: bool
    launch_pdl: bool


def supports_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on this device may start while the one before still runs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY


def launch_options(is_dependent: bool) -> LaunchOptions:
    """What to pass to a kernel that calls `let_next_start`; is_dependent: it starts while the one before still runs."""
    return {"IS_DEPENDENT": True, "launch_pdl": True} if is_dependent else {"IS_DEPENDENT": False}


@triton.jit
def let_next_start(IS_DEPENDENT: tl.constexpr):
    """Let the next kernel start. Without IS_DEPENDENT nothing happens."""
    if IS_DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(IS_DEPENDENT: tl.constexpr):
    """Wait for all earlier kernels. Without IS_DEPENDENT nothing happens."""
    if IS_DEPENDENT:
        gdc_wait()


@triton.jit
def follow(IS_DEPENDENT: tl.constexpr):
    """Let the next kernel start, then wait for the earlier ones: the begin of a kernel that can load nothing before."""
    let_next_start(IS_DEPENDENT)
    wait_for_previous(IS_DEPENDENT)


# Kernels between two matrices. A row's output bits depend on that row alone: a program computes one row, or a part of
# one, and shares nothing with other programs.


@triton.jit
def rms_norm(hidden, weight, outputs, size, row_stride, eps, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """RMSNorm of one row (size,) per program, BLOCK >= size, times weight (size,)."""
    let_next_start(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < size
    weights = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
    wait_for_previous(IS_DEPENDENT)
    values = tl.load(hidden + row * row_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    normed = (values * scale * weights).to(outputs.dtype.element_ty)
    tl.store(outputs + row * size + columns, normed, mask=is_inside)


@triton.jit
def prepare_heads(
    qkv,
    token_stride,
    rotation,
    weight,
    eps,
    cache,
    slots,
    scales,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Norm and rotary embedding of HEADS heads of one token per program, in place; also writes K/V to the cache.

    A token of qkv is (NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM): queries and keys, which are changed, then values. weight
    is (NUM_HEADS + NUM_KV_HEADS, HEAD_DIM). rotation is (num_tokens, 2, HEAD_DIM), see `RotaryTable`: its cosine is
    the same in both halves of a head, and its sine differs only in sign. cache, slots and scales are those of
    `PagedCache`; BLOCK_SIZE 0 means no cache.
    """
    let_next_start(IS_DEPENDENT)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, PAIRS)
    is_pair = pairs < HALF
    is_inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_pair[None, :]
    is_rotated = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None] & is_pair[None, :]
    offsets = heads[:, None] * HEAD_DIM + pairs[None, :]
    if HAS_NORM:
        first_weights = tl.load(weight + offsets, mask=is_rotated, other=1.0).to(tl.float32)
        second_weights = tl.load(weight + offsets + HALF, mask=is_rotated, other=1.0).to(tl.float32)
    wait_for_previous(IS_DEPENDENT)
    at = qkv + token * token_stride + offsets
    first = tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        factors = tl.where(heads < NUM_HEADS + NUM_KV_HEADS, tl.rsqrt(squares / HEAD_DIM + eps), 1.0)[:, None]
        first *= factors * first_weights
        second *= factors * second_weights
    angles = rotation + token * 2 * HEAD_DIM + pairs
    cos = tl.load(angles, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles + HEAD_DIM + HALF, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    rotated = tl.where(is_rotated, first * cos - second * sin, first)
    rotated_too = tl.where(is_rotated, second * cos + first * sin, second)
    tl.store(at, rotated.to(qkv.dtype.element_ty), mask=is_rotated)
    tl.store(at + HALF, rotated_too.to(qkv.dtype.element_ty), mask=is_rotated)
    if BLOCK_SIZE > 0:
        slot = tl.load(slots + token)
        if slot >= 0:
            kv_heads = heads - NUM_HEADS  # keys, then values; they have the same order in a block
            is_kept = is_inside & (kv_heads >= 0)[:, None]
            block = (slot // BLOCK_SIZE).to(tl.int64) * (2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM)
            places = cache + block + (kv_heads * BLOCK_SIZE + slot % BLOCK_SIZE)[:, None] * HEAD_DIM + pairs[None, :]
            kept, kept_too = rotated, rotated_too
            if cache.dtype.element_ty.is_fp8():
                is_kv = (kv_heads >= 0) & (kv_heads < 2 * NUM_KV_HEADS)
                steps = tl.load(scales + kv_heads, mask=is_kv, other=1.0)[:, None]
                kept, kept_too = rotated / steps, rotated_too / steps
            tl.store(places, to_cache(kept, cache.dtype.element_ty), mask=is_kept)
            tl.store(places + HALF, to_cache(kept_too, cache.dtype.element_ty), mask=is_kept)


@triton.jit
def to_cache(values, DTYPE: tl.constexpr):
    """Convert to the type of the cache. e4m3 has no infinity; larger values become its largest, 448."""
    if DTYPE.is_fp8():
        values = tl.clamp(values, -448.0, 448.0)
    return values.to(DTYPE)


@triton.jit
def activate(gate_up, outputs, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """activation(gate) * up for BLOCK values of one row per program: gate_up (2 * size,), gate first, to (size,)."""
    follow(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    at = gate_up + row * 2 * size + columns
    gate = tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=is_inside, other=0.0).to(tl.float32)
    values = activated(gate, ACTIVATION) * up
    tl.store(outputs + row * size + columns, values.to(outputs.dtype.element_ty), mask=is_inside)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """The activation of float32 values, by its name in config.json."""
    if ACTIVATION == "silu":
        factor = tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        factor = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # (1 + tanh(x)) / 2 is the sigmoid of 2 x.
        tl.static_assert(ACTIVATION == "gelu_pytorch_tanh")
        factor = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return gate * factor


@triton.jit
def multiply(
    inputs, weight, bias, norm_weight, outputs, num_rows, num_outs, input_stride, output_stride, eps,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, ADDS: tl.constexpr, ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCK: tl.constexpr,
    USES_DOT: tl.constexpr, PREFETCH: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A few rows of inputs (num_rows, COLUMNS) times weight, transposed; OUTS rows of weight per program.

    Each weight is read once, straight into registers. Such a product takes as long as its weights take to arrive. So
    all threads of a program lie along the inner dimension, in loads of 16 bytes, and a tile of weights is on its way
    while they multiply the one before it. The first tile depends on no other kernel. If IS_DEPENDENT, it is loaded, and
    more are fetched into the L2 cache, while the kernel before still runs.

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
