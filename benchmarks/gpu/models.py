"""The models that are measured: real shapes, random weights. And what a step of them must move and compute at least."""

import json
import pathlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.compare import checkpoints
from weft.engine.cache.specs import group_layers
from weft.engine.describe.config import ModelConfig, load_model_config
from weft.engine.parts.decoder import decoder_spec

_BEHIND_ATTENTION = 3
"""Matrices of a layer that follow its attention."""

DEMO = pathlib.Path(__file__).parents[2] / "server" / "demo_model"
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12_288,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": checkpoints.SHAPES["main"],
    "tiny": checkpoints.SHAPES["tiny"],
}


def model_folder(scratch: pathlib.Path, name: str) -> pathlib.Path:
    """Return a folder with configuration and tokenizer, and no weights; written if it is not there.

    The tiny model has the demo model's vocabulary, so that nobody waits for a large one.
    """
    folder = scratch / name
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True)
    values = dict(checkpoints.COMMON) | SHAPES[name]
    values |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_act": "silu"}
    if name == "tiny":
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(DEMO / file, folder)
        demo = json.loads((DEMO / "config.json").read_text())
        values |= {key: demo[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    else:
        checkpoints.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    return folder


def write_weights(folder: pathlib.Path, target: pathlib.Path, device: str) -> None:
    """Write a checkpoint with random bfloat16 weights, made on the device, for the model of folder.

    Args:
        folder: From `model_folder`.
        target: A folder that does not exist.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(folder, target)
    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(target)


@dataclass(frozen=True, slots=True)
class Work:
    """What a model's steps cost at least; K/V have the type of the weights."""

    config: ModelConfig

    @property
    def weights_bytes(self) -> int:
        """Bytes of the matrices that every step reads; of the embedding it reads some rows alone."""
        num_values = sum(m.out_features * m.in_features for m in decoder_spec(self.config).matrices)
        return num_values * self.config.dtype.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that a decode reads for every token of its context."""
        return sum(group.block_bytes(1, self.config.dtype) for group in group_layers(decoder_spec(self.config).caches))

    def decode_bytes(self, num_context_tokens: float) -> float:
        """Bytes that a decode step reads, over so many tokens of context of all requests together."""
        return self.weights_bytes + num_context_tokens * self.kv_bytes_per_token

    def decode_flops(self, num_requests: int, num_context_tokens: float) -> float:
        """Operations of a decode step of so many requests: matrices, and attention to the context."""
        heads = self.config.num_heads * self.config.head_dim * self.config.num_layers
        per_token = 2 * sum(m.out_features * m.in_features for m in decoder_spec(self.config).matrices)
        return num_requests * per_token + 4 * heads * num_context_tokens

    def prefill_flops(self, num_prompts: int, num_tokens: int) -> float:
        """Operations of whole prompts: matrices, causal attention, and of one row each the output head.

        Of the last layer, one row is all that is wanted behind its attention.
        """
        *matrices, head = [(m.out_features, m.in_features) for m in decoder_spec(self.config).matrices]
        per_token = 2 * sum(rows * columns for rows, columns in matrices[:-_BEHIND_ATTENTION])
        # Every query meets half of the prompt, in two products of two operations for each pair of values.
        heads = self.config.num_heads * self.config.head_dim * self.config.num_layers
        attention = 4 * heads * num_tokens * (num_tokens + 1) / 2
        one_row = 2 * sum(rows * columns for rows, columns in (*matrices[-_BEHIND_ATTENTION:], head))
        return num_prompts * (per_token * num_tokens + attention + one_row)


def read_work(folder: pathlib.Path) -> Work:
    """Read the sizes of a model."""
    return Work(load_model_config(folder))
