"""Tile sizes of `attend_kernel`: a small table with its reasons, in place of tuning at run time.

Tuning would take seconds at start-up, cannot run while a graph is captured, and might choose otherwise tomorrow. Every
pair of sizes is one compilation, so there are two: decode steps, and all others. Imports neither torch nor triton.
"""

from dataclasses import dataclass

_KEY_TILE_BYTES = 16 << 10
"""A tile of keys: large enough that memory is kept busy by the few that are under way at once."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program holds at a time.

    Attributes:
        rows: Pairs of token and query head, a power of two.
        keys: Keys of the context, a power of two.
        num_warps: Warps of 32 threads.
        num_stages: Tiles of keys and of values in use and under way from memory.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def choose_tile(
    head_dim: int, num_shared: int, value_bytes: int, *, is_decode: bool, is_deterministic: bool, shared_bytes: int
) -> Tile:
    """The tile for a kind of step.

    Args:
        head_dim: Values per head.
        num_shared: Query heads that share a K/V head; one token's heads are in one tile.
        value_bytes: Of a query's value; keys are converted to its type before they are multiplied.
        is_decode: Whether every request has one token.
        is_deterministic: One tile for all steps, since another one may add up in another order.
        shared_bytes: Shared memory that a program may have.
    """
    is_decode = is_decode and not is_deterministic
    head_bytes = padded(head_dim) * value_bytes
    keys = max(32, min(128, _KEY_TILE_BYTES // head_bytes))
    if value_bytes == 4:  # without matrix units, operands and scores of a tile have to fit into registers
        rows, num_warps = 16 if is_decode else 32, 4
    elif is_deterministic:  # the smallest tile that prefill can live with
        rows, num_warps = 64, 4
    elif is_decode:  # 16 is the fewest that matrix units take: decoding is bound by memory, not by them
        rows, num_warps = 16, 4
    else:  # the wider a tile, the less often K/V are read; its results are float32 in registers, 64 kB of them at most
        # Four warps multiply 64 rows: eight would compute the scores of a tile of 64 twice.
        rows, num_warps = (128, 8) if head_bytes <= 256 else (64, 4)
    rows = max(rows, padded(num_shared))
    # Two programs of a decode step share a multiprocessor, so that one loads while the other computes.
    room = shared_bytes // (2 if is_decode else 1) - rows * head_bytes - rows * keys * value_bytes
    num_stages = max(1, min(4 if is_decode else 3, 1 + room // (2 * keys * head_bytes)))
    return Tile(rows, keys, num_warps, num_stages)


def padded(number: int) -> int:
    """The next power of two, at least 16: what matrix units take."""
    return max(16, 1 << (number - 1).bit_length())
