"""Adapters that PEFT writes for tiny models: what the engine answers is what PEFT computes in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.architectures.checkpoints import write
from tests.engine.lora.adapters_for_tests import check_all, start_engine, write_adapter

PATTERNS = {
    "r": 4,
    "lora_alpha": 8,
    "use_rslora": True,
    "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 7},
    "alpha_pattern": {"down_proj": 3, "model.layers.0.self_attn.v_proj": 1},
    "layers_to_transform": [1],
    "target_modules": r".*(q_proj|v_proj|down_proj|gate_proj)",
}


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("llama", {}),
        ("llama", PATTERNS | {"layers_to_transform": None}),
        ("llama", {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
        ("phi3", {}),
        ("gpt_neox", {"target_modules": ["query_key_value", "dense_h_to_4h", "embed_in", "lm_head"]}),
        ("gpt2", {"target_modules": ["c_attn", "c_fc", "c_proj", "wte", "lm_head"], "fan_in_fan_out": True}),
        ("gemma2", {"target_modules": ["q_proj", "k_proj", "up_proj", "embed_tokens"]}),
    ],
)
def test_answers_are_those_of_peft(tmp_path: Path, model: str, config: dict[str, Any]) -> None:
    """Two adapters and none share the steps."""
    folder = write(model, tmp_path / "model")
    references: dict[str | None, Any] = {
        name: write_adapter(folder, tmp_path / name, seed, **config) for seed, name in enumerate(("one", "two"))
    }
    if not references["two"].config.tie_word_embeddings:  # else PEFT would add to the head what is the embedding's
        references["two"] = references["two"].merge_and_unload()
    references[None] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    engine = start_engine(folder, {name: tmp_path / name for name in ("one", "two")})
    check_all(engine, references)
