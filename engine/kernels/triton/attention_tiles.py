"""Sizes of the Triton attention for a GPU: the tiles that it may have, splits of the context, and room for metadata.

Tiles are a short list by name for each kind of step. Which is fastest has to be measured; without a measurement the
first one is used. Every tile is one compilation, so a list has only tiles that registers and shared memory of the
compiled code leave a reason to choose. Hopper and Blackwell read the operands of large products from shared memory;
others read them from registers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.triton.attention_plan import NUM_ITEM_FIELDS, NUM_MERGE_FIELDS, Tiling

# Bytes of a tile of keys: large enough that a few tiles in flight keep memory busy.
_KEY_TILE_BYTES = 16 << 10

# Shared memory that a multiprocessor keeps of each program. Its own is as much larger than that of the largest program.
_RESERVED_BYTES = 1 << 10

# Shared memory of a program besides its tiles.
_SCRATCH_BYTES = 1 << 10

# Results of a tile, float32 in registers: half of those of a multiprocessor.
_RESULT_BYTES = 128 << 10

# Major compute capabilities whose large products read keys and values from shared memory.
_READING_SHARED = (9, 10)
_HOPPER = 9


@dataclass(frozen=True, slots=True)
class Gpu:
    """What bounds tiles.

    Attributes:
        capability: Compute capability.
        num_processors: Multiprocessors.
        shared_bytes: Shared memory that a program may have.
    """

    capability: tuple[int, int]
    num_processors: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class HeadShape:
    """A layer's heads.

    Attributes:
        head_dim: Values per head.
        num_shared: Query heads that share a K/V head; one token's heads are in one tile.
        value_bytes: Bytes of a query's value; keys are converted to its type before the product.
        is_latent: Whether the values are a part of the keys; then a token's heads may be in several tiles.
    """

    head_dim: int
    num_shared: int
    value_bytes: int
    is_latent: bool = False

    @property
    def is_padded(self) -> bool:
        """Whether a tile has more columns than a head has values."""
        return padded(self.head_dim) != self.head_dim

    @property
    def is_wide(self) -> bool:
        """Whether 64 rows of results need the registers of 8 warps."""
        return padded(self.head_dim) > 256


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
class TileNames:
    """The tiles of a backend, by name; None means the first of its list."""

    decode: str | None = None
    prompts: str | None = None


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; Triton's interpreter passes for an Ampere GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def gpu_of(device: torch.device) -> Gpu:
    """The bounds of a CUDA device; Triton's interpreter, which has none, gets those of a small one."""
    capability = capability_of(device)
    if device.type != "cuda":
        return Gpu(capability, 4, 160 << 10)
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Gpu(capability, properties.multi_processor_count, shared_bytes)


def head_shape(spec: PagedKV, num_heads: int, dtype: torch.dtype) -> HeadShape:
    """The heads of a KV group's layers, which have num_heads query heads of this type unless the spec says more."""
    num_shared = (spec.num_heads or num_heads) // spec.num_kv_heads
    return HeadShape(spec.head_dim, num_shared, dtype.itemsize, spec.latent_dim is not None)


def tile_names(
    groups: Sequence[CacheGroup[PagedKV]], num_heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[str], list[str]]:
    """Names of the tiles for decodes and for prompts that all groups have, the first ones first."""
    gpu, shapes = gpu_of(device), [head_shape(group.spec, num_heads, dtype) for group in groups]
    decodes, prompts = ([list(tiles(shape, gpu)) for shape in shapes] for tiles in (decode_tiles, prompt_tiles))
    return _in_all(decodes), _in_all(prompts)


def decode_tiles(shape: HeadShape, gpu: Gpu) -> dict[str, Tile]:
    """Tiles for requests of one token, named by the KiB of keys that they take at a time.

    Memory is the limit, so they have 16 rows, the fewest of a matrix unit, and leave room for a second program on the
    multiprocessor, which loads while the first computes. With 32 KiB of keys there are half as many passes, and fewer
    stages; three programs then share a multiprocessor of Hopper if heads have 128 values. Two warps instead of four
    would leave fewer warps on a multiprocessor, since shared memory bounds the programs.
    """
    if shape.is_latent:
        return {"triton-latent": latent_tile(shape, gpu, 16)}
    rows, keys = max(16, padded(shape.num_shared)), _num_keys(shape)
    tiles = {"triton-16k": _tile(shape, gpu, rows, keys, _num_warps(shape, rows), max_stages=4, num_programs=2)}
    is_in_registers = rows == 16 and shape.value_bytes < 4
    if is_in_registers and _num_stages(shape, gpu, rows, 2 * keys, num_programs=2) > 1:
        tiles["triton-32k"] = _tile(shape, gpu, rows, 2 * keys, 4, max_stages=4, num_programs=2)
    return _fitting(tiles)


def prompt_tiles(shape: HeadShape, gpu: Gpu) -> dict[str, Tile]:
    """Tiles for all other requests, named by their rows; results are float32 in registers.

    - 64 rows in 4 warps: two programs share a multiprocessor, so that one computes its softmax while the other's
      products run. Before Hopper they take half as many keys, since registers hold the operands, too. Wide heads have
      8 warps, and fewer rows where memory has no room for 64; the name stays, for other groups have the rows.
    - 128 rows in 8 warps: K/V are read half as often. There are too few registers for a second program, so the softmax
      of four warps has only the products of the other four beside it. Before Hopper they take half as many keys
      where shared memory has no room for three stages, or heads are padded, whose masks take registers, too.

    Hopper begins with 64, because within a program nothing else runs while it computes a softmax; others with 128.
    """
    if shape.is_latent:
        return {"triton-latent": latent_tile(shape, gpu, 64)}
    keys, least = _num_keys(shape), padded(shape.num_shared)
    if shape.value_bytes == 4:  # no matrix units: operands and scores of a tile must fit in registers
        sizes = [(max(32, least), keys, _num_warps(shape, 32), 1)]
    else:
        keys_of_64 = keys if gpu.capability[0] in _READING_SHARED else max(32, keys // 2)
        sizes = [(64, keys_of_64, _num_warps(shape, 64), 2)]
        # Elsewhere heads of more than 128 values would spill registers.
        if padded(shape.head_dim) <= 128 or (gpu.capability[0] == _HOPPER and not shape.is_wide):
            is_tight = shape.is_padded or _num_stages(shape, gpu, 128, keys, num_programs=1) < 3
            keys_of_128 = max(32, keys // 2) if is_tight and gpu.capability[0] not in _READING_SHARED else keys
            sizes.append((128, keys_of_128, 8, 1))
        if gpu.capability[0] != _HOPPER:
            sizes.reverse()
    sizes = [size for size in sizes if size[0] >= shape.num_shared] or [(least, keys, 8, 1)]
    tiles = {f"triton-{s[0]}": _tile(shape, gpu, *s[:3], max_stages=3, num_programs=s[3]) for s in sizes}
    return _fitting(tiles)


def deterministic_tile(shape: HeadShape, gpu: Gpu) -> Tile | None:
    """The one tile for all steps, since another may sum in another order: the smallest with acceptable prefill."""
    if shape.is_latent:
        return latent_tile(shape, gpu, 64)
    rows = max(32 if shape.value_bytes == 4 else 64, padded(shape.num_shared))
    return _tile(shape, gpu, rows, _num_keys(shape), _num_warps(shape, rows), max_stages=3)


def latent_tile(shape: HeadShape, gpu: Gpu, rows: int) -> Tile:
    """A tile for latents, whose results are up to 512 float32 a row in registers: fewer rows if memory has no room.

    Queries and two tiles of latents are in shared memory, of which one is loaded while the other is used.
    """
    key_bytes, room = shape.head_dim * shape.value_bytes, gpu.shared_bytes - _SCRATCH_BYTES
    keys = 32 if shape.value_bytes < 4 else 16
    while rows > 16 and (rows + 2 * keys) * key_bytes > room:
        rows //= 2
    num_stages = 2 if (rows + 2 * keys) * key_bytes <= room else 1
    return Tile(rows, keys, 8 if rows > 16 else 4, num_stages)


def padded(number: int) -> int:
    """The next power of two, at least 16, as matrix units need it."""
    return max(16, 1 << (number - 1).bit_length())


def _in_all(lists: list[list[str]]) -> list[str]:
    return [name for name in lists[0] if all(name in names for names in lists)] if lists else []


def _fitting(tiles: dict[str, Tile | None]) -> dict[str, Tile]:
    return {name: tile for name, tile in tiles.items() if tile}


def _num_keys(shape: HeadShape) -> int:
    least = 64 // shape.value_bytes
    return max(least, min(128, _KEY_TILE_BYTES // (padded(shape.head_dim) * shape.value_bytes)))


def _num_warps(shape: HeadShape, rows: int) -> int:
    return 8 if shape.is_wide and rows > 16 else 4


def _tile(
    shape: HeadShape, gpu: Gpu, rows: int, keys: int, num_warps: int, *, max_stages: int, num_programs: int = 1
) -> Tile | None:
    """A tile that leaves room for num_programs on a multiprocessor, or for one if it could not be loaded ahead else.

    It has fewer rows, but all heads of a token, where memory has no room; None if that does not help.
    """
    while rows > padded(shape.num_shared) and not _num_stages(shape, gpu, rows, keys, num_programs=1):
        rows //= 2
    possible = [_num_stages(shape, gpu, rows, keys, number) for number in (num_programs, 1)]
    num_stages = min(max_stages, next((stages for stages in possible if stages > 1), possible[-1]))
    has_registers = rows * padded(shape.head_dim) * 4 <= _RESULT_BYTES
    return Tile(rows, keys, num_warps, num_stages) if num_stages and has_registers else None


def _num_stages(shape: HeadShape, gpu: Gpu, rows: int, keys: int, num_programs: int) -> int:
    """The most stages for which shared memory has room, 0 if it has none for one."""
    head_bytes = padded(shape.head_dim) * shape.value_bytes
    room = (gpu.shared_bytes + _RESERVED_BYTES) // num_programs - _RESERVED_BYTES - rows * head_bytes
    stage_bytes = 2 * keys * head_bytes
    if rows >= 64 and shape.value_bytes < 4 and gpu.capability[0] in _READING_SHARED:
        return max(0, room - _SCRATCH_BYTES) // stage_bytes
    room -= rows * keys * shape.value_bytes  # weights
    return 1 + room // stage_bytes if 2 * room >= stage_bytes else 0  # one is in registers, after its keys were here


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
