"""triton.py: its checks in Triton's interpreter, and its kernels compiled for GPUs that are not here."""

import importlib.util
import pathlib
from importlib import metadata

import numpy as np
import pytest

from tests.engine.kernels.triton.compiled_attention import GPUS, VALUE_BYTES, compile_attend, compile_for
from tests.triton_compilation import ARCHITECTURES
from tests.triton_interpreter import needs_triton, run_interpreted
from weft.engine.kernels.triton.attention_tiles import (
    HeadShape,
    Tile,
    decode_tiles,
    deterministic_tile,
    padded,
    prompt_tiles,
)


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


def first_tile(capability: int, head_dim: int, dtype: str, *, is_decode: bool) -> Tile:
    tiles = decode_tiles if is_decode else prompt_tiles
    return next(iter(tiles(HeadShape(head_dim, 4, VALUE_BYTES[dtype]), GPUS[capability]).values()))


ATTEND = [(90, 128, "bf16", "bf16")]
MORE_ATTEND = [
    *[(capability, 128, "bf16", "bf16") for capability in (80, 100)],
    *[(capability, 128, "fp16", "fp8e4nv") for capability in (90, 100)],
    *[(capability, head_dim, "bf16", "bf16") for capability in (80, 86, 90, 100) for head_dim in (64, 80, 256)],
    *[(capability, 128, "fp32", "fp32") for capability in (80, 90, 100)],
]


@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_decode", [True, False])
@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype", "cache_dtype"),
    [*ATTEND, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_ATTEND)],
)
def test_attention_compiles_and_loads_ahead(
    capability: int, head_dim: int, dtype: str, cache_dtype: str, is_decode: bool
) -> None:
    """Blocks that were looked up in the pass that needs them kept K/V from being loaded ahead."""
    tile = first_tile(capability, head_dim, dtype, is_decode=is_decode)
    compiled = compile_attend(capability, head_dim, dtype, cache_dtype, tile, is_uniform=is_decode)
    assert compiled.metadata.shared <= GPUS[capability].shared_bytes
    if dtype == cache_dtype:
        tile_bytes = 2 * tile.keys * padded(head_dim) * VALUE_BYTES[dtype]
        assert compiled.metadata.shared >= (tile.num_stages - 1) * tile_bytes
    used = "fma.rn.f32" if dtype == "fp32" else "mma.sync"
    if not is_decode and dtype != "fp32":
        used = {90: "wgmma", 100: "tcgen05.mma"}.get(capability, used)
    assert used in compiled.asm["ptx"]


@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("window", "is_deterministic"), [(4096, False), (0, True)])
@pytest.mark.slow
def test_windows_and_determinism_compile(capability: int, window: int, is_deterministic: bool) -> None:
    tile = first_tile(capability, 128, "bf16", is_decode=False)
    if is_deterministic:
        tile = deterministic_tile(HeadShape(128, 4, 2), GPUS[capability])
    compiled = compile_attend(capability, 128, "bf16", "bf16", tile, is_uniform=is_deterministic, window=window)
    assert compiled.metadata.shared <= GPUS[capability].shared_bytes


@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize(("is_decode", "window"), [(True, 0), (False, 4096)])
def test_soft_caps_compile_and_load_ahead(capability: int, is_decode: bool, window: int) -> None:
    """Heads as wide as Gemma 2 has them; the cap's exponentials are the hardware's, as those of the softmax are."""
    tile = first_tile(capability, 256, "bf16", is_decode=is_decode)
    plain, capped = (
        compile_attend(capability, 256, "bf16", "bf16", tile, is_uniform=is_decode, window=window, soft_cap=soft_cap)
        for soft_cap in (0.0, 72.0)
    )
    assert capped.metadata.shared == plain.metadata.shared <= GPUS[capability].shared_bytes
    assert capped.asm["ptx"].count("ex2.approx") > plain.asm["ptx"].count("ex2.approx")


@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_merging_compiles(capability: int) -> None:
    from weft.engine.kernels.triton.attention_kernels import merge_kernel

    sizes = {"HEAD_DIM": 80, "PADDED_DIM": 128, "IS_DEPENDENT": False}
    tensors = {"outputs": "bf16", "merges": "i32", "partials": "fp32", "partial_sums": "fp32"}
    merged = compile_for(capability, merge_kernel, tensors, [], {"NUM_HEADS": 8, "TILE_PARTS": 16, **sizes})
    assert "ex2.approx" in merged.asm["ptx"]
