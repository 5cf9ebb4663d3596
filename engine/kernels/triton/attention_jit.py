"""Triton kernels of attention: attend to the paged cache, of keys and values or of latents, and merge split contexts.

Kernels follow the items of `attention_plan` and decide nothing themselves. So a captured graph computes another step
once the items in device memory have changed. A block of the cache holds keys, then values, each (num_kv_heads,
block_size, head_dim): what one K/V head reads is contiguous. A latent is the key of all heads, and in its first part
their value.

Scores are multiplied by log2(e), so that exp2 can replace exp. Online softmax: Milakov and Gimelshein, 2018. Tiles: Dao
et al., 2022. Split contexts, merged by log-sum-exp: Dao et al., Flash-Decoding, 2023.
"""

import triton
import triton.language as tl

from weft.engine.kernels.triton.layers_jit import follow

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_kernel(
    queries: tl.tensor,
    outputs: tl.tensor,
    cache: tl.tensor,
    metadata: tl.tensor,
    items: tl.tensor,
    partials: tl.tensor,
    partial_sums: tl.tensor,
    slopes: tl.tensor,
    sinks: tl.tensor,
    scales: tl.tensor,
    query_stride,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Attend with one tile of queries to one range of keys; the grid is items x K/V heads.

    Rows of a tile are (token, query head of the K/V head), token by token, so that K/V are read once for the NUM_SHARED
    heads that share them. WINDOW, SPAN, SOFT_CAP 0 mean none; SPAN -1: rows see keys behind them. IS_UNIFORM masks keys
    by row, so that no bit of it depends on its tile; else those that all see are faster. slopes, sinks: (num_heads,).
    """
    follow(IS_DEPENDENT)
    item = items + (tl.program_id(0) // NUM_KV_HEADS) * 7
    num_tokens = tl.load(item + 2)
    if num_tokens == 0:
        return
    table, first_token = metadata + tl.load(item), tl.load(item + 1).to(tl.int64)
    first_position = tl.load(item + 3)
    first_key, last_key, partial = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    kv_head, rows = tl.program_id(0) % NUM_KV_HEADS, tl.arange(0, TILE_ROWS)
    tokens, heads = rows // NUM_SHARED, kv_head * NUM_SHARED + rows % NUM_SHARED
    positions, is_row = first_position + tokens, tokens < num_tokens
    dims = tl.arange(0, PADDED_DIM)
    is_query = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = (first_token + tokens)[:, None] * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(queries + offsets, mask=is_query, other=0.0)
    slope = tl.load(slopes + heads) * LOG2_E if HAS_SLOPES else 0.0
    scale, value_scale = load_scales(cache, scales, kv_head, NUM_KV_HEADS, SCALE)
    maxima, sums, attended = nothing_seen(TILE_ROWS, PADDED_DIM)
    heads_start, masked_from = cache + kv_head * (BLOCK_SIZE * HEAD_DIM), first_key  # before it, rows see every key
    blocks = load_blocks(table, first_key, last_key, BLOCK_SIZE, TILE_KEYS)
    if not IS_UNIFORM and WINDOW == 0 and SPAN == 0:
        masked_from = tl.maximum(first_key, tl.minimum(last_key, first_position + 1) // TILE_KEYS * TILE_KEYS)
        maxima, sums, attended, blocks = _attend_keys(
            maxima, sums, attended, blocks, query, positions, slope, heads_start, table,
            first_key, masked_from, last_key,
            scale, SOFT_CAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SPAN, HAS_SLOPES, PADDED_DIM, TILE_KEYS, False,
        )  # fmt: skip
    maxima, sums, attended, blocks = _attend_keys(
        maxima, sums, attended, blocks, query, positions, slope, heads_start, table, masked_from, last_key, last_key,
        scale, SOFT_CAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SPAN, HAS_SLOPES, PADDED_DIM, TILE_KEYS, True,
    )  # fmt: skip
    if HAS_SINKS and partial < 0:  # those of parts join when parts are merged
        sums += tl.exp2(tl.load(sinks + heads) * LOG2_E - tl.where(sums == 0, 0.0, maxima))
    attended *= value_scale
    targets = (tl.where(partial < 0, first_token, partial) + tokens) * (NUM_KV_HEADS * NUM_SHARED) + heads
    store_attended(maxima, sums, attended, partial, targets, dims, is_row, outputs, partials, partial_sums, HEAD_DIM)


@triton.jit
def load_scales(cache, scales, kv_head, NUM_KV_HEADS: tl.constexpr, SCALE: tl.constexpr):
    """Factors on the scores and on the values of a head; scales (2, NUM_KV_HEADS) are those of an fp8 cache."""
    if cache.dtype.element_ty.is_fp8():
        return tl.load(scales + kv_head) * SCALE, tl.load(scales + NUM_KV_HEADS + kv_head)
    else:
        return SCALE, 1.0


@triton.jit
def nothing_seen(TILE_ROWS: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Maxima, sums and weighted values of rows before their first key."""
    maxima, sums = tl.full([TILE_ROWS], float("-inf"), tl.float32), tl.zeros([TILE_ROWS], tl.float32)
    return maxima, sums, tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)


@triton.jit
def store_attended(
    maxima,
    sums,
    attended,
    partial,
    targets,
    dims,
    is_row,
    outputs: tl.tensor,
    partials: tl.tensor,
    partial_sums: tl.tensor,
    VALUE_DIM: tl.constexpr,
):
    """Divide rows by their sums, and store them: as outputs of the step if partial < 0, else as parts to be merged.

    targets are indices of (row of either, query head).
    """
    attended /= tl.where(sums == 0, 1.0, sums)[:, None]  # a padding row sees no key and gets zeros
    offsets = targets[:, None] * VALUE_DIM + dims[None, :]
    is_value = is_row[:, None] & (dims < VALUE_DIM)[None, :]
    if partial < 0:
        tl.store(outputs + offsets, attended.to(outputs.dtype.element_ty), mask=is_value)
    else:
        tl.store(partials + offsets, attended, mask=is_value)
        tl.store(partial_sums + targets, maxima + tl.log2(sums), mask=is_row)


@triton.jit
def load_blocks(table, start, last_key, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """The block of each key from start on; after the last key block 0, which always exists."""
    keys = start + tl.arange(0, TILE_KEYS)
    return tl.load(table + keys // BLOCK_SIZE, mask=keys < last_key, other=0)


@triton.jit
def _attend_keys(
    maxima,
    sums,
    attended,
    blocks,
    query,
    positions,
    slope,
    heads_start,
    table,
    start,
    stop,
    last_key,
    scale,
    SOFT_CAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Process the keys from start to stop; returns the new maxima, sums, weighted values, and the next blocks."""
    dims = tl.arange(0, PADDED_DIM)
    side: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    for first in range(start, stop, TILE_KEYS):
        # Look up blocks one tile ahead. Otherwise loads of keys would have to wait for their addresses.
        next_blocks = load_blocks(table, first + TILE_KEYS, last_key, BLOCK_SIZE, TILE_KEYS)
        keys = first + tl.arange(0, TILE_KEYS)
        # After the context there may be anything, NaN included, and a weight of 0 would not hide NaN.
        is_key = keys < last_key
        is_value = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        starts = blocks.to(tl.int64) * (2 * side) + keys % BLOCK_SIZE * HEAD_DIM
        sources = heads_start + starts[:, None] + dims[None, :]
        key = tl.load(sources, mask=is_value, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SOFT_CAP > 0:
            scores = _soft_cap(scores, SOFT_CAP)
        if HAS_SLOPES:
            scores += slope[:, None] * (keys[None, :] - positions[:, None])
        if IS_MASKED:
            is_seen = is_key[None, :] & (keys[None, :] <= positions[:, None])
            if SPAN < 0:
                is_seen = is_key[None, :] & (positions >= 0)[:, None]
            if WINDOW > 0:
                is_seen &= keys[None, :] > positions[:, None] - WINDOW
            if SPAN > 0:
                is_seen &= keys[None, :] >= (positions - positions % SPAN)[:, None]
            scores = tl.where(is_seen, scores, float("-inf"))
        new_maxima = tl.maximum(maxima, tl.max(scores, 1))
        # A row that has seen no key has the maximum -inf, and -inf - -inf is NaN.
        shifts = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)
        weights = tl.exp2(scores - shifts[:, None])
        decay = tl.exp2(maxima - shifts)
        sums = sums * decay + tl.sum(weights, 1)
        value = tl.load(sources + side, mask=is_value, other=0.0).to(query.dtype)
        attended = tl.dot(weights.to(query.dtype), value, attended * decay[:, None], input_precision="ieee")
        maxima = new_maxima
        blocks = next_blocks
    return maxima, sums, attended, blocks


@triton.jit
def _soft_cap(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP), both times log2(e), by tanh(x) = 1 - 2 / (exp(2 x) + 1).

    The exponential is limited to 2 ** 64, where the quotient no longer counts beside 1, so that it stays finite.
    """
    RATE: tl.constexpr = 2 * LOG2_E / CAP
    return CAP - 2 * CAP / (tl.exp2(tl.minimum(scores * RATE, 64.0)) + 1)


@triton.jit
def merge_kernel(
    outputs: tl.tensor,
    merges: tl.tensor,
    partials: tl.tensor,
    partial_sums: tl.tensor,
    sinks: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Merge the parts of one token and head by their log-sum-exp; the grid is merges x heads, and some are empty."""
    follow(IS_DEPENDENT)
    merge = merges + tl.program_id(0) // NUM_HEADS * 4
    head = tl.program_id(0) % NUM_HEADS
    num_parts = tl.load(merge + 2)
    if num_parts == 0:
        return
    token = tl.load(merge).to(tl.int64)
    first = tl.load(merge + 1)
    stride = tl.load(merge + 3)
    dims = tl.arange(0, PADDED_DIM)
    is_value = dims < HEAD_DIM
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    attended = tl.zeros([PADDED_DIM], tl.float32)
    for start in range(0, num_parts, TILE_PARTS):
        parts = start + tl.arange(0, TILE_PARTS)
        is_part = parts < num_parts
        sources = (first + parts * stride) * NUM_HEADS + head
        sums = tl.load(partial_sums + sources, mask=is_part, other=float("-inf"))
        values = tl.load(
            partials + sources[:, None] * HEAD_DIM + dims[None, :], mask=is_part[:, None] & is_value[None, :], other=0.0
        )
        new_maximum = tl.maximum(maximum, tl.max(sums, 0))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a token may see nothing of the first parts
        weights = tl.exp2(sums - shift)
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(weights, 0)
        attended = attended * decay + tl.sum(weights[:, None] * values, 0)
        maximum = new_maximum
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head) * LOG2_E - maximum)
    outputs += (token * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(outputs, (attended / total).to(outputs.dtype.element_ty), mask=is_value)


@triton.jit
def write_latents_kernel(
    latents: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    latent_stride,
    KEY_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write a token's latent to its slot, -1 for none; the grid is tokens."""
    follow(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    dims = tl.arange(0, PADDED_DIM)
    values = tl.load(latents + token * latent_stride + dims, mask=dims < KEY_DIM)
    tl.store(cache + slot * KEY_DIM + dims, values.to(cache.dtype.element_ty), mask=dims < KEY_DIM)


# A latent is loaded once for the scores and the results of a tile's rows. Its size and that of the rotary part behind
# it are two powers of two, which one padded head would not be.
@triton.jit
def attend_latents_kernel(
    queries: tl.tensor,
    outputs: tl.tensor,
    cache: tl.tensor,
    metadata: tl.tensor,
    items: tl.tensor,
    partials: tl.tensor,
    partial_sums: tl.tensor,
    query_stride,
    SCALE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    PADDED_ROTARY: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Attend with one tile of queries to one range of latents; the grid is items x tiles.

    Rows are (token, head), token by token; a token with more heads than a tile has NUM_TILES of them.
    """
    follow(IS_DEPENDENT)
    item = items + (tl.program_id(0) // NUM_TILES) * 7
    num_tokens = tl.load(item + 2)
    if num_tokens == 0:
        return
    table = metadata + tl.load(item)
    first_token = tl.load(item + 1).to(tl.int64)
    first_key, last_key, partial = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    rows = tl.program_id(0) % NUM_TILES * TILE_ROWS + tl.arange(0, TILE_ROWS)
    tokens, heads = rows // NUM_HEADS, rows % NUM_HEADS
    positions, is_row = tl.load(item + 3) + tokens, tokens < num_tokens
    dims, turned = tl.arange(0, PADDED_LATENT), tl.arange(0, PADDED_ROTARY)
    is_dim, is_turned = dims < LATENT_DIM, turned < ROTARY_DIM
    starts = queries + (first_token + tokens) * query_stride + heads * (LATENT_DIM + ROTARY_DIM)
    query = tl.load(starts[:, None] + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    query_turned = tl.load(
        starts[:, None] + LATENT_DIM + turned[None, :], mask=is_row[:, None] & is_turned[None, :], other=0.0
    )
    maxima, sums, attended = nothing_seen(TILE_ROWS, PADDED_LATENT)
    blocks = load_blocks(table, first_key, last_key, BLOCK_SIZE, TILE_KEYS)
    for first in range(first_key, last_key, TILE_KEYS):
        # Look up blocks one tile ahead. Otherwise loads of latents would have to wait for their addresses.
        next_blocks = load_blocks(table, first + TILE_KEYS, last_key, BLOCK_SIZE, TILE_KEYS)
        keys = first + tl.arange(0, TILE_KEYS)
        is_key = keys < last_key  # behind the context there may be anything, NaN included
        slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
        sources = (cache + slots * (LATENT_DIM + ROTARY_DIM))[:, None]
        latent = tl.load(sources + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0).to(query.dtype)
        key_turned = tl.load(
            sources + LATENT_DIM + turned[None, :], mask=is_key[:, None] & is_turned[None, :], other=0.0
        ).to(query.dtype)
        scores = tl.dot(query_turned, tl.trans(key_turned), input_precision="ieee")
        scores = tl.dot(query, tl.trans(latent), scores, input_precision="ieee") * SCALE
        scores = tl.where(is_key[None, :] & (keys[None, :] <= positions[:, None]), scores, float("-inf"))
        new_maxima = tl.maximum(maxima, tl.max(scores, 1))
        shifts = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)  # a row may have seen no key yet
        weights = tl.exp2(scores - shifts[:, None])
        decay = tl.exp2(maxima - shifts)
        sums = sums * decay + tl.sum(weights, 1)
        attended = tl.dot(weights.to(query.dtype), latent, attended * decay[:, None], input_precision="ieee")
        maxima, blocks = new_maxima, next_blocks
    targets = (tl.where(partial < 0, first_token, partial) + tokens) * NUM_HEADS + heads
    store_attended(
        maxima, sums, attended, partial, targets, dims, is_row, outputs, partials, partial_sums, LATENT_DIM
    )  # fmt: skip
