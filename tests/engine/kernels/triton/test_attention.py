"""Attention in Triton's interpreter, and its tiles; tests/fake_gpu compiles the kernels."""

import importlib.util
import pathlib
from importlib import metadata

import numpy as np
import pytest

from tests.triton_interpreter import needs_triton, run_interpreted
from weft.engine.kernels.triton.attention_tuning import Tile, choose_tile

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""What a program may have, by compute capability."""

VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def has_broken_range() -> bool:
    """Whether the interpreter makes integers of arrays with one value, which NumPy refuses since 2.4."""
    if importlib.util.find_spec("triton") is None:
        return False
    triton, numpy = (tuple(map(int, v.split(".")[:2])) for v in (metadata.version("triton"), np.__version__))
    return triton < (3, 9) and numpy >= (2, 4)


@needs_triton
@pytest.mark.skipif(has_broken_range(), reason="this Triton's interpreter cannot count with this NumPy")
@pytest.mark.timeout(900)
def test_parity_in_the_interpreter() -> None:
    run_interpreted(pathlib.Path(__file__).with_name("interpreted_attention.py"))


def tile_for(capability: int, head_dim: int, dtype: str, *, is_decode: bool, is_deterministic: bool = False) -> Tile:
    return choose_tile(
        head_dim,
        4,
        VALUE_BYTES[dtype],
        is_decode=is_decode,
        is_deterministic=is_deterministic,
        shared_bytes=SHARED_BYTES[capability],
    )


def test_a_tile_holds_all_heads_of_a_token_and_fits() -> None:
    for shared_bytes in SHARED_BYTES.values():
        for head_dim in (64, 80, 96, 128, 256):
            for num_shared in (1, 3, 8, 71):
                for is_decode in (True, False):
                    tile = choose_tile(
                        head_dim, num_shared, 2, is_decode=is_decode, is_deterministic=False, shared_bytes=shared_bytes
                    )
                    assert tile.rows >= num_shared
                    assert tile.rows == 16 or tile.rows >= 16 * tile.num_warps, "warps that repeat what others do"
                    assert tile.num_stages >= (2 if num_shared <= 8 else 1)


def test_a_deterministic_backend_has_one_tile() -> None:
    for head_dim in (64, 128, 256):
        decode, other = (
            tile_for(90, head_dim, "bf16", is_decode=is_decode, is_deterministic=True) for is_decode in (True, False)
        )
        assert decode == other
