"""Triton kernels between two matrices: norm; QK-norm, rotary embedding and K/V write; activation.

They compute in float32 and round once, at the end. A row's output bits depend on that row alone: a program computes one
row, or a part of one, and shares nothing with other programs.
"""

import triton
import triton.language as tl

from weft.engine.kernels.triton.dependent_launch import follow, let_next_start, wait_for_previous


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
