"""Latent attention: log-probabilities against transformers, for what the default configurations leave out."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.minicpm3 import MiniCPM3Config
from transformers.models.youtu import YoutuConfig

from tests.engine.layers.test_decoder import Runner
from weft.engine.cache.specs import PagedKV
from weft.engine.describe.config import load_model_config
from weft.engine.families.latent import read_latent
from weft.engine.families.switches import UseModule
from weft.engine.fields import Fields
from weft.engine.kernels.cpu.layer_kernels import CpuKernels
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.torch.layer_kernels import TorchKernels
from weft.engine.parts.decoder import decoder_spec
from weft.engine.wire.errors import ModelError

SIZES = {
    "vocab_size": 80,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS = {
    "low-rank queries, neighbours, biases": YoutuConfig(**SIZES, q_lora_rank=24, attention_bias=True),
    "plain queries, neighbours": YoutuConfig(**SIZES, q_lora_rank=None),
    "halves": YoutuConfig(**SIZES, q_lora_rank=None, rope_interleave=False),
    "YaRN, both multipliers": YoutuConfig(
        **SIZES, q_lora_rank=24, rope_parameters={**YARN, "mscale": 0.8, "mscale_all_dim": 1.2}
    ),
    "YaRN, no multiplier": YoutuConfig(**SIZES, q_lora_rank=24, rope_parameters=YARN),
    "multipliers": MiniCPM3Config(**SIZES, q_lora_rank=24, scale_emb=3, scale_depth=0.7, dim_model_base=16),
    "no multipliers": MiniCPM3Config(**SIZES, q_lora_rank=24, scale_depth=None, dim_model_base=None),
}
PROMPTS = [torch.arange(4, 44), torch.tensor([7, 50, 3])]


def write(folder: Path, config: PreTrainedConfig) -> torch.nn.Module:
    torch.manual_seed(3)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk_size", [7, 64])
def test_log_probabilities_are_those_of_transformers(tmp_path: Path, name: str, chunk_size: int) -> None:
    model = write(tmp_path, CONFIGS[name])
    for prompt, logits in zip(PROMPTS, Runner(tmp_path).run(PROMPTS, chunk_size), strict=True):
        with torch.no_grad():
            expected = model(prompt[None]).logits[0]
        torch.testing.assert_close(logits.log_softmax(-1), expected.float().log_softmax(-1), atol=1e-4, rtol=0)


def test_a_token_keeps_one_latent_and_the_rotary_part_of_its_key(tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["plain queries, neighbours"])
    specs = decoder_spec(load_model_config(tmp_path)).caches
    assert specs == (PagedKV(1, 40, scale=24**-0.5, latent_dim=32),) * 2
    assert specs[0].bytes_per_block(16, torch.bfloat16) == 16 * 40 * 2


def test_native_layers_compute_what_torch_does(tmp_path: Path, library: NativeLibrary) -> None:
    write(tmp_path, CONFIGS["low-rank queries, neighbours, biases"])
    plain, native = (Runner(tmp_path, kernels, torch.bfloat16) for kernels in (TorchKernels(), CpuKernels(library)))
    exact = Runner(tmp_path).run(PROMPTS, 64)
    for own, others, right in zip(native.run(PROMPTS, 7), plain.run(PROMPTS, 7), exact, strict=True):
        assert (own - right).abs().mean() < 1.2 * (others - right).abs().mean() + 1e-3


@pytest.mark.parametrize(
    "changes", [{"head_dim": 24}, {"attention_bias": True, "q_lora_rank": None}], ids=["head_dim", "attention_bias"]
)
def test_what_only_the_module_computes_is_left_to_it(changes: dict[str, object]) -> None:
    with pytest.raises(UseModule, match=next(iter(changes))):
        read_latent(Fields(changes, "config.json"))


def test_layers_that_only_draft_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["halves"])
    (path,) = tmp_path.glob("*.safetensors")
    save_file({**load_file(path), "model.layers.2.eh_proj.weight": torch.ones(2, 2)}, path)
    with pytest.raises(ModelError, match=r"model\.layers\.2\.eh_proj\.weight .* has no place"):
        Runner(tmp_path)
    Runner(tmp_path, num_draft_layers=1)
