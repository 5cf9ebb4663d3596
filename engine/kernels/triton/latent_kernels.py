"""Triton kernels for latents, of which each is the key of all heads, and in its first part their value.

They follow the items of `attention_plan`, as `attend_kernel` does; `merge_kernel` merges the parts. A latent is loaded
once for the scores and the results of a tile's rows. Its size and that of the rotary part behind it are two powers of
two, which one padded head would not be.
"""

import triton
import triton.language as tl

from weft.engine.kernels.triton.attention_kernels import load_blocks, nothing_seen, store_attended
from weft.engine.kernels.triton.dependent_launch import follow


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

    Rows are (token, head), token by token. If a token has more heads than a tile, it has NUM_TILES tiles.
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
