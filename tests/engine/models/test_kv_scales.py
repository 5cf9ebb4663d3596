"""Scales of K and V under the names that tools give them, and what the caches of a rank get of them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.quantized_checkpoints import fp8_static, write, write_base
from weft.engine import config as engine_config
from weft.engine.describe.config import load_model_config
from weft.engine.describe.cut import Cut
from weft.engine.models.cut import shard
from weft.engine.models.loading import read_kv_scales
from weft.engine.parts.decoder import decoder_spec
from weft.engine.start.model_choice import plan_model, read_model
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions

NUM_KV_HEADS = 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def add(folder: Path, **scales: object) -> None:
    """Add tensors to the attention of layer 1; `__` stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, values in scales.items():
        tensors[f"model.layers.1.self_attn.{name.replace('__', '.')}"] = torch.tensor(values, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")


def read(base: Path, folder: Path, rank: int = 0, num_ranks: int = 1, **scales: object) -> dict[int, list[list[float]]]:
    shutil.copytree(base, folder, dirs_exist_ok=True)
    add(folder, **scales)
    whole = decoder_spec(load_model_config(folder))
    found = read_kv_scales(folder, whole, shard(whole, rank, num_ranks), Cut(rank, num_ranks, has_sums=True))
    return {layer: sides.tolist() for layer, sides in found.items()}


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("k_scale", "v_scale"),
        ("attn__k_scale", "attn__v_scale"),
        ("k_proj__k_scale", "v_proj__v_scale"),
        ("qkv_proj__k_scale", "qkv_proj__v_scale"),
        ("k_proj__output_scale", "v_proj__output_scale"),
    ],
)
def test_a_scale_of_a_layer_is_that_of_all_its_heads(base: Path, tmp_path: Path, keys: str, values: str) -> None:
    found = read(base, tmp_path, **{keys: 0.25, values: [0.5]})
    assert found == {1: [[0.25] * NUM_KV_HEADS, [0.5] * NUM_KV_HEADS]}


def test_one_scale_may_be_of_both_and_what_has_none_has_1(base: Path, tmp_path: Path) -> None:
    assert read(base, tmp_path / "both", kv_scale=0.125) == {1: [[0.125] * NUM_KV_HEADS] * 2}
    assert read(base, tmp_path / "values", v_scale=0.5) == {1: [[1.0] * NUM_KV_HEADS, [0.5] * NUM_KV_HEADS]}


def test_ranks_get_the_scales_of_their_heads(base: Path, tmp_path: Path) -> None:
    """compressed-tensors has those of heads as (num_kv_heads, 1, 1)."""
    scales = {"k_scale": [[[0.25]], [[0.5]]], "v_scale": [[[2.0]], [[4.0]]]}
    assert read(base, tmp_path / "alone", **scales) == {1: [[0.25, 0.5], [2.0, 4.0]]}
    of_ranks = [read(base, tmp_path / str(rank), rank, 2, **scales) for rank in range(2)]
    assert of_ranks == [{1: [[0.25], [2.0]]}, {1: [[0.5], [4.0]]}]


@pytest.mark.parametrize(
    ("scale", "fault"),
    [
        ([0.5] * 3, r"k_scale has shape \[3\], config.json asks for \[2\]"),
        (-1.0, "k_scale must hold positive numbers, scales of a KV cache, got -1"),
        ([0.5, float("inf")], "k_scale must hold positive numbers"),
    ],
)
def test_scales_that_cannot_be_are_refused(base: Path, tmp_path: Path, scale: object, fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        read(base, tmp_path, k_scale=scale)


@pytest.mark.parametrize(
    ("changes", "rounded", "are_read"),
    [
        ({}, torch.float8_e4m3fn, True),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, torch.float8_e4m3fn, True),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, torch.float8_e4m3fn, False),
        ({"kv_cache_quant_algo": "NVFP4"}, torch.float8_e4m3fn, False),
        ({}, None, False),
    ],
)
def test_scales_are_read_for_an_fp8_cache_if_they_are_of_8_bits(
    base: Path, tmp_path: Path, changes: dict[str, object], rounded: torch.dtype | None, are_read: bool
) -> None:
    """Those of fewer bits would let the largest values saturate."""
    write(base, tmp_path, {"quant_method": "fp8", "activation_scheme": "static", **changes}, fp8_static)
    add(tmp_path, k_scale=0.25)
    options = EngineOptions(model=str(tmp_path), device="cpu", dtype="float32", max_model_len=32)
    facts = read_model(tmp_path, "auto")
    config = replace(engine_config.resolve(options, facts), rounded_kv=rounded)  # a CPU has no fp8
    assert bool(plan_model(facts, config).kv_scales(tmp_path)) == are_read


@pytest.mark.parametrize(
    "quantization",
    [
        {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        },
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
    ids=["compressed-tensors", "modelopt"],
)
def test_a_checkpoint_may_have_scales_of_k_and_v_alone(
    base: Path, tmp_path: Path, quantization: dict[str, object]
) -> None:
    """It was refused, for it says of no weights how they are quantized."""
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    add(tmp_path, k_proj__k_scale=0.25)
    fields = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": quantization}))
    facts = read_model(tmp_path, "auto")
    options = EngineOptions(model=str(tmp_path), device="cpu", dtype="float32", max_model_len=32)
    config = replace(engine_config.resolve(options, facts), rounded_kv=torch.float8_e4m3fn)
    plan = plan_model(facts, config)
    plan.load(tmp_path, lambda done, total: None)
    assert list(plan.kv_scales(tmp_path)) == [1]
