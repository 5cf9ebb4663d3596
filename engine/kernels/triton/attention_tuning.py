"""Sizes of the Triton attention for a device: the chosen tiles, splits of the context, and room for metadata."""

from dataclasses import dataclass

import torch

from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.triton.attention_plan import NUM_ITEM_FIELDS, NUM_MERGE_FIELDS, Splitting
from weft.engine.kernels.triton.attention_tiles import (
    Tile,
    TileNames,
    decode_tiles,
    deterministic_tile,
    gpu_of,
    head_shape,
    prompt_tiles,
)

# Programs per multiprocessor that a step aims at: two run at a time, and the last ones should be short.
_PROGRAMS_PER_PROCESSOR = 4

# A request of up to this many tokens (the end of a prompt, or drafts) is split as far as one of a single token.
_SPLIT_TOKENS = 16

# In integers. Arrays in the metadata start at multiples of 16 bytes; otherwise Triton would compile kernels once more.
_ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The most of each that a batch may have, padding included."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class GroupTuning:
    """How a KV group is computed: tiles for one-token requests and for all others, and how contexts are split."""

    decode_tile: Tile
    tile: Tile
    splitting: Splitting | None


def tune(
    group: CacheGroup[PagedKV],
    num_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    limits: BatchLimits,
    tiles: TileNames,
    is_deterministic: bool,
) -> GroupTuning:
    """Choose for the device, or for Triton's interpreter. Deterministic results need one tile and no split.

    Raises:
        ValueError: There is no tile of a name for this group.
    """
    gpu, shape = gpu_of(device), head_shape(group.spec, num_heads, dtype)
    if is_deterministic:
        tile = deterministic_tile(shape, gpu)
        return GroupTuning(tile, tile, None)
    num_parts = max(1, gpu.num_processors * _PROGRAMS_PER_PROCESSOR // group.spec.num_kv_heads)
    max_rows = num_parts * _SPLIT_TOKENS + limits.max_num_seqs
    return GroupTuning(
        _named(tiles.decode, decode_tiles(shape, gpu)),
        _named(tiles.prompts, prompt_tiles(shape, gpu)),
        Splitting(num_parts, max_rows),
    )


def _named(name: str | None, tiles: dict[str, Tile]) -> Tile:
    if name is None:
        return next(iter(tiles.values()))
    if name not in tiles:
        raise ValueError(f"there is no attention tile {name} for these heads on this GPU, only {', '.join(tiles)}")
    return tiles[name]


def most_integers(tunings: list[GroupTuning], limits: BatchLimits, block_size: int) -> int:
    """Integers in the metadata of the largest batch."""
    num_tokens = limits.max_num_batched_tokens
    total = len(tunings) * aligned(-(-limits.max_model_len // block_size) * limits.max_num_seqs)  # block tables
    for tuning in tunings:
        num_parts, max_rows = (tuning.splitting.num_parts, tuning.splitting.max_rows) if tuning.splitting else (0, 0)
        total += aligned(num_tokens) + aligned(limits.max_num_seqs + 1)  # slots, starts of prompts
        total += aligned((num_tokens + 2 * num_parts) * NUM_ITEM_FIELDS)  # items of two launches
        total += 2 * aligned(max_rows * NUM_MERGE_FIELDS) + _ALIGNMENT  # merges of two launches
    return total


def aligned(size: int) -> int:
    """Integers that an array of this size takes in the metadata."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
