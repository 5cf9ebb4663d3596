"""Adapters of experts, one by one as checkpoints and adapters of transformers 4 have them, and of what is beside."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.architectures.checkpoints import write
from tests.engine.lora.adapters_for_tests import PROMPTS, add, check_all, start_engine
from tests.engine.test_golden import run

RANK, SCALE = 3, 2.0


def write_adapter(model: Path, folder: Path, merged: Path, seed: int) -> Any:
    """Write an adapter of all matrices of a model's layers; returns the model into which it is merged."""
    torch.manual_seed(seed)
    weights, tensors = load_file(model / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith("proj.weight")]:
        num_outputs, num_inputs = weights[name].shape
        a, b = torch.randn(RANK, num_inputs) * 0.2, torch.randn(num_outputs, RANK) * 0.2
        weights[name] += SCALE * b @ a
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    assert any(".experts.1.up_proj." in name for name in tensors)
    for path in (folder, merged):
        path.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": r".*proj"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    (merged / "config.json").write_bytes((model / "config.json").read_bytes())
    return AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_answers_are_those_of_the_merged_model(tmp_path: Path, name: str) -> None:
    """With an expert that all tokens share, and without."""
    model = write(name, tmp_path / "model")
    references: dict[str | None, Any] = {
        adapter: write_adapter(model, tmp_path / adapter, tmp_path / f"{adapter}-merged", seed)
        for seed, adapter in enumerate(("one", "two"))
    }
    references[None] = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    check_all(start_engine(model, {adapter: tmp_path / adapter for adapter in ("one", "two")}), references)


def test_native_experts_take_adapters(tmp_path: Path) -> None:
    """In bfloat16 the answer differs from that of float32 by rounding, and not by what else shares its steps."""
    sizes = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32, "intermediate_size": 64}
    model = write("qwen3_moe", tmp_path / "model", sizes)
    write_adapter(model, tmp_path / "one", tmp_path / "merged", 0)
    folders = {"one": tmp_path / "one"}
    engine = start_engine(model, folders, dtype="bfloat16")
    merged = start_engine(tmp_path / "merged", {}, dtype="bfloat16", max_loras=0)
    prompt = PROMPTS[3]
    alone = run(engine, [add(0, "one", prompt)])[0, 0]
    mixed = run(engine, [add(1, None, PROMPTS[1]), add(2, "one", prompt), add(3, None, prompt)])
    right = run(merged, [add(4, None, prompt)])[4, 0]

    def values(output: Any) -> torch.Tensor:
        return torch.tensor([entry.logprob for entry in output.prompt_logprobs])

    assert torch.equal(values(alone), values(mixed[2, 0]))
    assert (values(alone) - values(right)).abs().mean() < 0.1 < (values(mixed[3, 0]) - values(right)).abs().mean()
