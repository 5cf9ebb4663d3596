"""Writes tiny random float32 checkpoints of every family with transformers, in either dialect of config.json.

The weights are scaled up, so that logits differ clearly and greedy choices do not hang on rounding.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 199
MAX_POSITION_EMBEDDINGS = 256

_BASE: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
}
_ORIGINAL = {"original_max_position_embeddings": 64}
LLAMA3_ROPE: dict[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    **_ORIGINAL,
}
YARN_ROPE: dict[str, object] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, **_ORIGINAL}
LINEAR_ROPE: dict[str, object] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_GEMMA2: dict[str, object] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 12.0,
}
"""Caps that scores and logits of such small models reach."""


@dataclass(frozen=True)
class Checkpoint:
    """A tiny model: its transformers model_type, what its configuration changes, and how it is stored."""

    model_type: str
    changes: dict[str, object] = field(default_factory=dict)
    dialect: int = 5
    max_shard_size: str = "5GB"
    seed: int = 0


CHECKPOINTS: dict[str, Checkpoint] = {
    "llama2": Checkpoint("llama", {"num_key_value_heads": 4}),
    "llama3": Checkpoint("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama3-dialect4": Checkpoint("llama", {"rope_parameters": LLAMA3_ROPE}, dialect=4),
    "llama-linear": Checkpoint("llama", {"rope_parameters": LINEAR_ROPE}, dialect=4),
    "llama-yarn": Checkpoint("llama", {"rope_parameters": YARN_ROPE}),
    "llama-biases": Checkpoint("llama", {"attention_bias": True, "mlp_bias": True}, max_shard_size="60KB"),
    "mistral": Checkpoint("mistral", {"sliding_window": 12}),
    "mistral-dialect4": Checkpoint("mistral", {"sliding_window": None, "head_dim": 16}, dialect=4),
    "qwen2": Checkpoint("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-dialect4": Checkpoint(
        "qwen2", {"rope_parameters": YARN_ROPE, "tie_word_embeddings": True}, dialect=4, max_shard_size="60KB"
    ),
    "qwen3": Checkpoint("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-dialect4": Checkpoint("qwen3", {"head_dim": 16}, dialect=4),
    "qwen3-windows": Checkpoint(
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma": Checkpoint("gemma", {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "gemma2": Checkpoint("gemma2", _GEMMA2 | {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    "gemma2-dialect4": Checkpoint("gemma2", _GEMMA2 | {"attention_bias": True}, dialect=4, max_shard_size="60KB"),
}
"""Every family in both dialects; between them every switch, tied and untied, single and sharded."""

_WIDE: dict[str, object] = {"hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2}
WIDE_CHECKPOINTS: dict[str, Checkpoint] = {
    "qwen3-wide": Checkpoint("qwen3", _WIDE | {"tie_word_embeddings": True}),
    "llama-wide": Checkpoint(
        "llama", _WIDE | {"head_dim": 128, "num_attention_heads": 8, "rope_parameters": LLAMA3_ROPE}
    ),
    "mistral-wide": Checkpoint("mistral", _WIDE | {"sliding_window": 40, "num_key_value_heads": 4}),
    "gemma2-wide": Checkpoint("gemma2", _WIDE | _GEMMA2 | {"head_dim": 256, "sliding_window": 40}),
}
"""Heads as wide as kernels for GPUs and CPUs are made for."""


def write_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write config.json, generation_config.json and safetensors into a new folder."""
    config = AutoConfig.for_model(checkpoint.model_type, **(_BASE | checkpoint.changes))
    torch.manual_seed(checkpoint.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.generation_config.eos_token_id = [2, 3]
    model.save_pretrained(folder, max_shard_size=checkpoint.max_shard_size)
    if checkpoint.dialect == 4:
        _rewrite_as_dialect_4(folder / "config.json")


def write_config(checkpoint: Checkpoint, folder: Path, **changes: object) -> Path:
    """Write config.json alone, for models whose weights nobody reads; returns the folder."""
    config = AutoConfig.for_model(checkpoint.model_type, **(_BASE | checkpoint.changes | changes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(folder)
    return folder


def load_reference(folder: Path) -> torch.nn.Module:
    """The checkpoint as a transformers model in float32, ready for inference."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def _rewrite_as_dialect_4(path: Path) -> None:
    """What transformers 4 wrote: rope_theta and rope_scaling, torch_dtype, and no layer_types."""
    values = json.loads(path.read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    values["torch_dtype"] = values.pop("dtype")
    values.pop("layer_types", None)
    path.write_text(json.dumps(values, indent=2))
