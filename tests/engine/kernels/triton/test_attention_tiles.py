"""The tiles of attention: their sizes, and what the compiled code says of the reasons for them."""

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.engine.kernels.triton.compiled_attention import GPUS, compile_attend, compile_attend_latents, machine_code
from tests.triton_interpreter import needs_triton
from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.triton.attention_tiles import (
    BatchLimits,
    Gpu,
    HeadShape,
    Tile,
    TileNames,
    decode_tiles,
    deterministic_tile,
    padded,
    prompt_tiles,
    tile_names,
    tune,
)

HOPPER, AMPERE = GPUS[90], GPUS[80]
PLANNED = {"triton-16k": 2, "triton-32k": 2, "triton-64": 2, "triton-128": 1}
"""Programs that share a multiprocessor."""


def heads(head_dim: int = 128, num_shared: int = 4, value_bytes: int = 2) -> HeadShape:
    return HeadShape(head_dim, num_shared, value_bytes)


def test_tiles_of_heads_of_128() -> None:
    assert decode_tiles(heads(), HOPPER) == {"triton-16k": Tile(16, 64, 4, 4), "triton-32k": Tile(16, 128, 4, 2)}
    assert list(prompt_tiles(heads(), HOPPER).items()) == [
        ("triton-64", Tile(64, 64, 4, 3)),
        ("triton-128", Tile(128, 64, 8, 3)),
    ]
    assert decode_tiles(heads(), AMPERE) == {"triton-16k": Tile(16, 64, 4, 3), "triton-32k": Tile(16, 128, 4, 2)}
    assert list(prompt_tiles(heads(), AMPERE).items()) == [
        ("triton-128", Tile(128, 64, 8, 3)),
        ("triton-64", Tile(64, 32, 4, 3)),
    ]


def test_tiles_of_wide_heads_and_of_float32() -> None:
    assert list(prompt_tiles(heads(256), HOPPER)) == ["triton-64", "triton-128"]
    assert list(prompt_tiles(heads(256), AMPERE)) == ["triton-64"]
    assert prompt_tiles(heads(512), HOPPER) == {"triton-64": Tile(64, 32, 8, 2)}
    assert prompt_tiles(heads(512), GPUS[86]) == {"triton-64": Tile(32, 32, 8, 2)}, "memory has no room for 64 rows"
    assert prompt_tiles(heads(512, value_bytes=4), GPUS[86]) == {"triton-32": Tile(32, 16, 8, 1)}
    assert not prompt_tiles(heads(512, num_shared=71), HOPPER)
    assert list(prompt_tiles(heads(value_bytes=4), HOPPER)) == ["triton-32"]
    assert list(decode_tiles(heads(value_bytes=4), HOPPER)) == ["triton-16k"]
    assert list(decode_tiles(heads(), GPUS[86])) == ["triton-16k"], "the other would not be loaded ahead"


@pytest.mark.parametrize("gpu", GPUS.values(), ids=str)
@pytest.mark.parametrize("value_bytes", [2, 4])
def test_a_tile_holds_all_heads_of_a_token_and_is_loaded_ahead(gpu: Gpu, value_bytes: int) -> None:
    for head_dim, num_shared in product((64, 80, 96, 128, 256, 512), (1, 3, 8, 71, 200)):
        shape = heads(head_dim, num_shared, value_bytes)
        tiles = [list(tiles(shape, gpu).values()) for tiles in (decode_tiles, prompt_tiles)]
        only = deterministic_tile(shape, gpu)
        assert (all(tiles) and only) or num_shared > 8
        for tile in (*tiles[0], *tiles[1], *[only] * bool(only)):
            assert tile.rows >= num_shared
            assert (tile.rows + tile.keys) * padded(head_dim) * value_bytes < gpu.shared_bytes
            is_small = tile.rows == 16 or value_bytes == 4 or head_dim > 256
            assert is_small or tile.rows >= 16 * tile.num_warps, "warps that repeat others"
            assert tile.num_stages >= (2 if num_shared <= 8 and value_bytes == 2 else 1)


def test_names_are_those_that_all_groups_have() -> None:
    groups = [CacheGroup(PagedKV(2, head_dim), (index,)) for index, head_dim in enumerate((128, 256, 512))]
    device = torch.device("cpu")
    assert tile_names(groups[:1], 8, torch.bfloat16, device) == (
        ["triton-16k", "triton-32k"],
        ["triton-128", "triton-64"],
    )
    assert tile_names(groups, 8, torch.bfloat16, device)[1] == ["triton-64"]
    assert tile_names([], 8, torch.bfloat16, device) == ([], [])


def test_tiles_are_chosen_by_name() -> None:
    group, cpu, limits = CacheGroup(PagedKV(2, 128), (0,)), torch.device("cpu"), BatchLimits(8, 64, 64)

    def chosen(tiles: TileNames, is_deterministic: bool = False) -> tuple[int, int]:
        tuning = tune(group, 8, torch.bfloat16, cpu, limits, tiles, is_deterministic)
        assert (tuning.others is None) == is_deterministic
        return tuning.short.tile.keys, tuning.launches[-1].tile.rows

    assert chosen(TileNames()) == (64, 128)
    assert chosen(TileNames("triton-32k", "triton-64")) == (128, 64)
    assert chosen(TileNames("triton-32k", "triton-128"), is_deterministic=True) == (64, 64)
    with pytest.raises(ValueError, match=r"^there is no attention tile triton-32 for .* only triton-128, triton-64$"):
        chosen(TileNames(prompts="triton-32"))
    group = CacheGroup(PagedKV(1, 512, num_heads=71), (0,))
    for is_deterministic in (False, True):
        with pytest.raises(ValueError, match=r"^there is no attention tile triton for .* only none$"):
            chosen(TileNames(), is_deterministic)


COMPILED = [
    (90, 128, "triton-16k"),
    (90, 128, "triton-32k"),
    (90, 128, "triton-64"),
    (90, 128, "triton-128"),
    (86, 512, "triton-64"),
    *[
        pytest.param(capability, 512, name, marks=pytest.mark.slow)
        for capability in (80, 90, 100)
        for name in ("triton-16k", "triton-64")
    ],
    *[
        pytest.param(capability, head_dim, name, marks=pytest.mark.slow)
        for capability in (80, 90)
        for head_dim in (64, 128, 256)
        for name in PLANNED
        if (capability, head_dim) != (90, 128) and (capability, head_dim, name) != (80, 256, "triton-128")
    ],
]


@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("capability", "head_dim", "name"), COMPILED)
def test_programs_share_a_multiprocessor_without_spills(
    capability: int, head_dim: int, name: str, tmp_path: Path
) -> None:
    """The reasons in `decode_tiles` and `prompt_tiles`, by registers and shared memory of the compiled code."""
    shape, gpu = heads(head_dim), GPUS[capability]
    decodes = decode_tiles(shape, gpu)
    tile = (decodes | prompt_tiles(shape, gpu))[name]
    compiled = compile_attend(capability, head_dim, "bf16", "bf16", tile, is_uniform=name in decodes)
    code = machine_code(compiled, tmp_path)
    assert code.shared_bytes >= (tile.num_stages - 1) * 2 * tile.keys * padded(head_dim) * 2, "K/V are loaded ahead"
    if capability == 90:
        assert code.local_bytes <= (160 if shape.is_wide else 0)
        is_product_large = name not in decodes
        assert ("wgmma.mma_async" in compiled.asm["ptx"]) == is_product_large
    else:
        assert code.local_bytes <= 64, "a few words outside of the loop"
    assert code.programs(gpu) >= (1 if shape.is_wide and name == "triton-64" else PLANNED[name])
    if name == "triton-128":
        assert code.programs(gpu) == 1, "too few registers for two"
    if (capability, head_dim, name) == (90, 128, "triton-32k"):
        assert code.programs(gpu) == 3


@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_heads", [16, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_results_of_latents_stay_in_registers(capability: int, num_heads: int, tmp_path: Path) -> None:
    gpu = GPUS[capability]
    shape = HeadShape(576, num_heads, 2, is_latent=True)
    for tiles in (decode_tiles, prompt_tiles):
        (tile,) = tiles(shape, gpu).values()
        code = machine_code(compile_attend_latents(capability, num_heads, "bf16", tile), tmp_path)
        assert code.local_bytes <= 160, "a few words"
        assert code.programs(gpu) >= (2 if tile.rows == 16 and capability == 90 else 1)
