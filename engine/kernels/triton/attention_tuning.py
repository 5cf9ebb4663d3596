"""How attention on CUDA is cut to size when its memory is allocated: tiles, splits, and the room for metadata."""

from dataclasses import dataclass

import torch

from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.triton.attention_plan import NUM_ITEM_FIELDS, NUM_MERGE_FIELDS, Splitting
from weft.engine.kernels.triton.attention_tiles import Tile, choose_tile

_PROGRAMS_PER_PROCESSOR = 4
"""Programs that a step aims at for each multiprocessor: two run on one at a time, and the last ones should be short."""

_SPLIT_TOKENS = 16
"""Tokens of one request whose context can be split as far as that of a single one: the end of a prompt, or drafts."""

_ALIGNMENT = 4
"""Integers: arrays in the metadata start at multiples of 16 bytes, or Triton would compile the kernels once more."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The most of each that a batch may have, padding included."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class GroupTuning:
    """How a KV group is computed: tiles of one-token requests and of all others, and how far contexts are split."""

    decode_tile: Tile
    tile: Tile
    splitting: Splitting | None


def tune(
    group: CacheGroup[PagedKV],
    num_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    limits: BatchLimits,
    is_deterministic: bool,
) -> GroupTuning:
    """Choose for the device, or for Triton's interpreter."""
    num_kv_heads = group.spec.num_kv_heads
    num_processors, shared_bytes = 4, 160 << 10  # of Triton's interpreter, which has neither
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        num_processors = properties.multi_processor_count
        shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    decode_tile, tile = (
        choose_tile(
            group.spec.head_dim,
            num_heads // num_kv_heads,
            dtype.itemsize,
            is_decode=decode,
            is_deterministic=is_deterministic,
            shared_bytes=shared_bytes,
        )
        for decode in (True, False)
    )
    num_parts = max(1, num_processors * _PROGRAMS_PER_PROCESSOR // num_kv_heads)
    max_rows = num_parts * _SPLIT_TOKENS + limits.max_num_seqs
    splitting = None if is_deterministic else Splitting(num_parts, max_rows)
    return GroupTuning(decode_tile, tile, splitting)


def most_integers(tunings: list[GroupTuning], limits: BatchLimits, block_size: int) -> int:
    """Integers that the metadata of the largest batch takes."""
    num_tokens = limits.max_num_batched_tokens
    total = len(tunings) * aligned(-(-limits.max_model_len // block_size) * limits.max_num_seqs)  # block tables
    for tuning in tunings:
        num_parts, max_rows = (tuning.splitting.num_parts, tuning.splitting.max_rows) if tuning.splitting else (0, 0)
        total += aligned(num_tokens) + aligned(limits.max_num_seqs + 1)  # slots, starts of prompts
        total += aligned((num_tokens + 2 * num_parts) * NUM_ITEM_FIELDS)  # of two launches, as the following
        total += 2 * aligned(max_rows * NUM_MERGE_FIELDS) + _ALIGNMENT
    return total


def aligned(size: int) -> int:
    """Integers that an array of so many takes in the metadata."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
