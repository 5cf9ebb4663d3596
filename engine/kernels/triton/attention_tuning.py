"""Sizes of the Triton attention for a device: the chosen tiles, splits of the context, and room for metadata."""

from dataclasses import dataclass, replace

import torch

from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.triton.attention_plan import NUM_ITEM_FIELDS, NUM_MERGE_FIELDS, Tiling
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

# Keys that a part reads at least, per row of its tile. A row's result takes as many bytes as a key with its value, and
# is written and read again, so that merging costs a quarter of what the part reads at most.
_ROW_KEYS = 8

# In integers. Arrays in the metadata start at multiples of 16 bytes; otherwise Triton would compile kernels once more.
_ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The most of each that a batch may have; graph.num_tokens is at most max_num_batched_tokens, too."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class LaunchTuning:
    """How some of a step's requests are computed; see IS_UNIFORM of `attend_kernel`."""

    tile: Tile
    tiling: Tiling
    is_uniform: bool


@dataclass(frozen=True, slots=True)
class GroupTuning:
    """How a KV group is computed: requests that fit one tile of `short`, and the others; without others, all alike."""

    short: LaunchTuning
    others: LaunchTuning | None

    @property
    def launches(self) -> list[LaunchTuning]:
        """Of a step with requests of all kinds."""
        return [self.short, self.others] if self.others else [self.short]


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
    num_shared = shape.num_shared
    if is_deterministic:
        only = deterministic_tile(shape, gpu)
        tile = _named(None, {"triton": only} if only else {})
        tiling = Tiling(max(1, tile.rows // num_shared), tile.keys, max_num_seqs=limits.max_num_seqs)
        return GroupTuning(LaunchTuning(tile, tiling, True), None)
    num_parts = max(1, gpu.num_processors * _PROGRAMS_PER_PROCESSOR // group.spec.num_kv_heads)
    decode_tile = _named(tiles.decode, decode_tiles(shape, gpu))
    prompt_tile = _named(tiles.prompts, prompt_tiles(shape, gpu))
    short, others = (
        Tiling(
            tokens=max(1, tile.rows // num_shared),
            keys=tile.keys,
            num_parts=max(1, num_parts // -(-num_shared // tile.rows)),
            least_part_keys=_ROW_KEYS * tile.rows,
            max_num_seqs=limits.max_num_seqs,
        )
        for tile in (decode_tile, prompt_tile)
    )
    others = replace(others, least_tokens=short.tokens + 1, splits_late=True)
    return GroupTuning(LaunchTuning(decode_tile, short, True), LaunchTuning(prompt_tile, others, False))


def _named(name: str | None, tiles: dict[str, Tile]) -> Tile:
    name = name or next(iter(tiles), "triton")
    if name not in tiles:
        there_is = ", ".join(tiles) or "none"
        raise ValueError(f"there is no attention tile {name} for these heads on this GPU, only {there_is}")
    return tiles[name]


def most_integers(tunings: list[GroupTuning], limits: BatchLimits, block_size: int) -> int:
    """Integers in the metadata of the largest batch."""
    num_tokens, max_num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    total = len(tunings) * aligned(-(-limits.max_model_len // block_size) * max_num_seqs)  # block tables
    for tuning in tunings:
        total += aligned(num_tokens) + aligned(max_num_seqs + 1)  # slots, starts of prompts
        total += aligned(num_tokens * NUM_MERGE_FIELDS)
        for launch in tuning.launches:
            total += aligned(launch.tiling.max_items(num_tokens) * NUM_ITEM_FIELDS)
    return total


def aligned(size: int) -> int:
    """Integers that an array of this size takes in the metadata."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
