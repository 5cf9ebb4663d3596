"""triton.py: its checks in Triton's interpreter, and its kernels compiled for GPUs that are not here."""

import importlib.util
import pathlib
from importlib import metadata
from typing import Any

import numpy as np
import pytest

from tests.triton_compilation import ARCHITECTURES
from tests.triton_interpreter import needs_triton, run_interpreted
from weft.engine.kernels.triton.attention_tuning import Tile, choose_tile, padded

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


def compile_for(
    capability: int, kernel: Any, tensors: dict[str, str], numbers: list[str], constants: dict[str, Any], **options: int
) -> Any:
    """Compile a kernel with tensors of these types, int32 numbers that are multiples of 16, and these constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: f"*{dtype}" for name, dtype in tensors.items()} | dict.fromkeys(numbers, "i32")
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in types}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=options | {"enable_fp_fusion": True}
    )


def compile_attend(
    capability: int,
    head_dim: int,
    dtype: str,
    cache_dtype: str,
    tile: Tile,
    *,
    is_uniform: bool,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Any:
    from weft.engine.kernels.triton.attention_kernels import attend_kernel

    integers = dict.fromkeys(("metadata", "items"), "i32")
    floats = dict.fromkeys(("partials", "partial_sums"), "fp32")
    constants = {
        "SCALE": 0.1,
        "SOFT_CAP": soft_cap,
        "NUM_KV_HEADS": 8,
        "NUM_SHARED": 4,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "WINDOW": window,
        "PADDED_DIM": padded(head_dim),
        "TILE_ROWS": tile.rows,
        "TILE_KEYS": tile.keys,
        "IS_UNIFORM": is_uniform,
        "IS_DEPENDENT": False,
    }
    tensors = {"queries": dtype, "outputs": dtype, "cache": cache_dtype, **integers, **floats}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return compile_for(capability, attend_kernel, tensors, ["query_stride"], constants, **options)


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
    tile = tile_for(capability, head_dim, dtype, is_decode=is_decode)
    compiled = compile_attend(capability, head_dim, dtype, cache_dtype, tile, is_uniform=is_decode)
    assert compiled.metadata.shared <= SHARED_BYTES[capability]
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
    tile = tile_for(capability, 128, "bf16", is_decode=False, is_deterministic=is_deterministic)
    compiled = compile_attend(capability, 128, "bf16", "bf16", tile, is_uniform=is_deterministic, window=window)
    assert compiled.metadata.shared <= SHARED_BYTES[capability]


@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize(("is_decode", "window"), [(True, 0), (False, 4096)])
def test_soft_caps_compile_and_load_ahead(capability: int, is_decode: bool, window: int) -> None:
    """Heads as wide as Gemma 2 has them; the cap's exponentials are the hardware's, as those of the softmax are."""
    tile = tile_for(capability, 256, "bf16", is_decode=is_decode)
    plain, capped = (
        compile_attend(capability, 256, "bf16", "bf16", tile, is_uniform=is_decode, window=window, soft_cap=soft_cap)
        for soft_cap in (0.0, 72.0)
    )
    assert capped.metadata.shared == plain.metadata.shared <= SHARED_BYTES[capability]
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
