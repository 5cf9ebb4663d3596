"""Sizes of the Triton attention for a device: tiles, splits of the context, and room for metadata.

Tile sizes come from a small table with reasons instead of tuning at run time. Tuning would take seconds at start-up,
cannot run while a graph is captured, and might choose differently the next day. Every pair of sizes is one compilation,
so there are two: for requests whose tokens fit into one small tile (decodes, short drafts), and for all others.
"""

from dataclasses import dataclass, replace

import torch

from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.triton.attention_plan import NUM_ITEM_FIELDS, NUM_MERGE_FIELDS, Tiling

# Bytes of a tile of keys: large enough that a few tiles in flight keep memory busy.
_KEY_TILE_BYTES = 16 << 10

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
class Tile:
    """What one program holds at a time.

    Attributes:
        rows: Pairs of token and query head, a power of two.
        keys: Keys of the context, a power of two.
        num_warps: Warps of 32 threads.
        num_stages: Tiles of keys and values in use or in flight.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


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
    is_deterministic: bool,
) -> GroupTuning:
    """Choose for the device, or for Triton's interpreter."""
    spec = group.spec
    num_processors, shared_bytes = 4, 160 << 10  # for the interpreter, which has neither
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        num_processors = properties.multi_processor_count
        shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    shape = spec.head_dim, num_heads // spec.num_kv_heads, dtype.itemsize
    decode_tile, tile = (
        choose_tile(*shape, is_decode=decode, is_deterministic=is_deterministic, shared_bytes=shared_bytes)
        for decode in (True, False)
    )
    num_parts = max(1, num_processors * _PROGRAMS_PER_PROCESSOR // spec.num_kv_heads)
    num_shared = num_heads // spec.num_kv_heads
    if is_deterministic:
        tiling = Tiling(tile.rows // num_shared, tile.keys, max_num_seqs=limits.max_num_seqs)
        return GroupTuning(LaunchTuning(tile, tiling, True), None)
    short, others = (
        Tiling(
            tokens=t.rows // num_shared,
            keys=t.keys,
            num_parts=num_parts,
            least_part_keys=_ROW_KEYS * t.rows,
            max_num_seqs=limits.max_num_seqs,
        )
        for t in (decode_tile, tile)
    )
    others = replace(others, least_tokens=short.tokens + 1, splits_late=True)
    return GroupTuning(LaunchTuning(decode_tile, short, True), LaunchTuning(tile, others, False))


def choose_tile(
    head_dim: int, num_shared: int, value_bytes: int, *, is_decode: bool, is_deterministic: bool, shared_bytes: int
) -> Tile:
    """The tile for a kind of step.

    Args:
        head_dim: Values per head.
        num_shared: Query heads that share a K/V head; one token's heads are in one tile.
        value_bytes: Bytes of a query's value; keys are converted to its type before the product.
        is_decode: Whether every request has one token.
        is_deterministic: Use one tile for all steps, since another may sum in another order.
        shared_bytes: Shared memory that a program may have.
    """
    is_decode = is_decode and not is_deterministic
    head_bytes = padded(head_dim) * value_bytes
    keys = max(32, min(128, _KEY_TILE_BYTES // head_bytes))
    if value_bytes == 4:  # no matrix units: operands and scores of a tile must fit in registers
        rows, num_warps = 16 if is_decode else 32, 4
    elif is_deterministic:  # the smallest tile with an acceptable prefill speed
        rows, num_warps = 64, 4
    elif is_decode:  # memory is the limit, so take 16, the fewest rows of a matrix unit
        rows, num_warps = 16, 4
    else:  # wider tiles read K/V less often; their results are float32 in registers, at most 64 kB
        # Four warps for 64 rows: eight would compute the scores of a tile of 64 twice.
        rows, num_warps = (128, 8) if head_bytes <= 256 else (64, 4)
    rows = max(rows, padded(num_shared))
    # Two programs of a decode step share a multiprocessor, so that one loads while the other computes.
    room = shared_bytes // (2 if is_decode else 1) - rows * head_bytes - rows * keys * value_bytes
    num_stages = max(1, min(4 if is_decode else 3, 1 + room // (2 * keys * head_bytes)))
    return Tile(rows, keys, num_warps, num_stages)


def padded(number: int) -> int:
    """The next power of two, at least 16, as matrix units need it."""
    return max(16, 1 << (number - 1).bit_length())


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
