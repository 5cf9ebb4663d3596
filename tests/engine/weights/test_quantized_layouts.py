"""Quantized matrices of families whose plain ones lie otherwise: transposed, and experts in one tensor."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import quantized_checkpoints as written
from tests.architectures import checkpoints as architectures
from tests.engine.weights.test_quantized import GPTQ, compare, reader
from weft.engine.describe.config import load_model_config
from weft.engine.fields import Fields
from weft.engine.models.cut import shard
from weft.engine.models.loading import DecodedSource, lacks_head
from weft.engine.parts.decoder import decoder_spec
from weft.engine.weights.quantization import read_quantization
from weft.engine.weights.reader import ExpertsRef
from weft.engine.weights.tensor_files import CheckpointSource

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [64, 96])
def test_experts_of_gpt_oss_are_read_the_right_way_round(tmp_path: Path, size: int) -> None:
    """Unquantized ones are (inputs, outputs), and those in MXFP4 (outputs, inputs), square or not."""
    plain = architectures.write("gpt_oss", tmp_path / "base", {"intermediate_size": size})
    (folder := tmp_path / "own").mkdir()
    experts = ("experts.gate_up_proj", "experts.down_proj")
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    compare(folder, written.write(plain, folder, config, written.mxfp4, lambda name: name.endswith(experts)))
    for rank, num_ranks in ((0, 1), (1, 2)):
        refs = shard(decoder_spec(load_model_config(folder)), rank, num_ranks).weights
        for ref in (ref for ref in refs if isinstance(ref, ExpertsRef)):
            both = zip(reader(folder).experts(ref), reader(folder).expert_groups(ref), strict=True)
            for (weight, bias), (groups, same_bias) in both:
                assert groups is not None and torch.equal(groups.dequantize(torch.float32), weight)
                assert bias is same_bias is None or torch.equal(bias, same_bias)  # type: ignore[arg-type]


def test_projections_that_others_have_transposed_are_read(tmp_path: Path) -> None:
    """GPTQ has the matrices of GPT-2 as those of others."""

    def quantize(module: str, weight: torch.Tensor) -> tuple[written.Tensors, torch.Tensor]:
        tensors, values = written.gptq(4, symmetric=False)(module, weight.T)
        return tensors, values.T

    plain, is_matrix = architectures.write("gpt2", tmp_path / "base"), ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    (folder := tmp_path / "own").mkdir()
    compare(folder, written.write(plain, folder, {"bits": 4, **GPTQ}, quantize, lambda name: name.endswith(is_matrix)))


@pytest.mark.parametrize("is_fused", [False, True])
def test_experts_are_read_one_by_one_and_fused(tmp_path: Path, is_fused: bool) -> None:
    """As they are published, and as transformers 5 has them in memory; a router may be quantized, too."""
    plain, is_matrix = architectures.write("qwen3_moe", tmp_path / "base"), ("_proj.weight", ".gate.weight")
    (folder := tmp_path / "own").mkdir()
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    quantize = written.fp8_blocks(32, 32)
    plain = written.write(plain, folder, config, quantize, lambda name: name.endswith(is_matrix))
    if is_fused:
        tensors = load_file(folder / "model.safetensors")
        for ending in ("", "_scale_inv"):
            for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
                experts = [f"{layer}.experts.{index}" for index in range(len(tensors[f"{layer}.gate.weight"]))]
                for parts, fused in ((["gate_proj", "up_proj"], "gate_up_proj"), (["down_proj"], "down_proj")):
                    found = [[tensors.pop(f"{name}.{part}.weight{ending}") for part in parts] for name in experts]
                    tensors[f"{layer}.experts.{fused}{ending}"] = torch.stack([torch.cat(each) for each in found])
        save_file(tensors, folder / "model.safetensors")
    compare(folder, plain)


def test_targets_are_named_as_in_the_files_where_the_text_half_is_served(tmp_path: Path) -> None:
    """Weft's names are those that the half has alone."""
    names = {f"model.language_model.layers.{layer}.mlp.up_proj" for layer in range(2)}
    tensors = {f"{name}.weight": torch.ones(4, 8, dtype=torch.int8) for name in names}
    scales = {"0": torch.full((4, 1), 2.0), "1": torch.full((4, 4), 2.0)}
    save_file(
        tensors | {f"{name}.weight_scale": scales[name.split(".")[3]] for name in names}, tmp_path / "model.safetensors"
    )
    groups = {
        f"group_{layer}": {"targets": [name], "weights": {"num_bits": 8, "strategy": strategy, "group_size": 2}}
        for (layer, name), strategy in zip(enumerate(sorted(names)), ("channel", "group"), strict=True)
    }
    fields = Fields({"quant_method": "compressed-tensors", "config_groups": groups}, "config.json")
    quantization = read_quantization(fields)
    assert quantization is not None
    source = DecodedSource(CheckpointSource(tmp_path, CPU), quantization, CPU)
    for layer, size in enumerate((8, 2)):
        found = source.groups(f"model.layers.{layer}.mlp.up_proj.weight", (4, 8))
        assert found is not None and found.group_size == size
        assert torch.equal(found.dequantize(torch.float32), torch.full((4, 8), 2.0))


def test_a_quantized_output_head_is_one(tmp_path: Path) -> None:
    """The text half of a checkpoint without a head shares it with the embedding."""
    config = load_model_config(architectures.write("llama", tmp_path))
    for names, expected in ((["lm_head.qweight", "lm_head.scales"], False), (["model.norm.weight"], True)):
        save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
        assert lacks_head(tmp_path, config) == expected
