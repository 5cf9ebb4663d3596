"""Models of every kind of decode step: shapes scaled down from real ones, random weights. And what a step touches."""

import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.engine.cache.specs import PagedKV
from weft.engine.describe.config import load_model_config
from weft.engine.describe.specs import DecoderSpec
from weft.engine.parts.decoder import decoder_spec
from weft.engine.weights.reader import ExpertsRef

VALUE_BYTES = 2
VOCAB_SIZE = 32_768
_COMMON: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 8192,
    "hidden_size": 1024,
    "rope_theta": 1e6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, Mapping[str, Any]] = {
    "dense": {  # Qwen3-0.6B with half of the layers, for comparison
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 14,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
    },
    "experts": {  # Qwen3-30B-A3B with half of its width and of its experts, and an eighth of the layers
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 3072,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
    },
    "sinks": {  # gpt-oss-20b with half of its width and of its experts, and a quarter of the layers
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 1440,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1440,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
    "latent": {  # DeepSeek-V3 with a seventh of its width; latents are as large as its own
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 2560,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 320,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "q_lora_rank": 384,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    "hybrid": {  # Falcon-H1-0.5B
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_hidden_layers": 36,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 2048,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "lm_head_multiplier": 0.039,
        "embedding_multiplier": 5.66,
        "attention_out_multiplier": 0.94,
    },
}


def model_folder(scratch: pathlib.Path, name: str) -> pathlib.Path:
    """Write the configuration of a model, which is all that an engine needs for random weights."""
    folder = scratch / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_COMMON, **SHAPES[name]}, indent=1))
    return folder


@dataclass(frozen=True, slots=True)
class Touched:
    """What decode steps of a model read, and of states write, at least."""

    spec: DecoderSpec

    @classmethod
    def read(cls, folder: pathlib.Path) -> "Touched":
        """Of the model with this configuration."""
        return cls(decoder_spec(load_model_config(folder)))

    def weight_bytes(self, num_experts: int) -> int:
        """Weights of a step in which so many experts have rows, of all layers together; of the embedding only a row."""
        refs = [ref for ref in self.spec.weights if isinstance(ref, ExpertsRef)]
        values = sum(ref.num_values for ref in self.spec.weights) - sum(ref.num_values for ref in refs)
        if self.spec.head is not None:
            values -= self.spec.embedding.num_values
        # All layers with experts have the same sizes: a matrix for gate and up, and one for down.
        values += num_experts * sum(ref.matrix.num_values for ref in refs[:2])
        return values * VALUE_BYTES

    def cache_bytes(self, num_tokens: int) -> int:
        """Caches of one request with so many tokens: keys, values and latents within their windows, states twice."""
        total = 0
        for cache in self.spec.caches:
            if isinstance(cache, PagedKV):
                seen = num_tokens - cache.first_seen(num_tokens - 1)
                total += seen * cache.num_sides * cache.num_kv_heads * cache.head_dim * VALUE_BYTES
            else:
                total += 2 * cache.bytes_per_request
        return total
