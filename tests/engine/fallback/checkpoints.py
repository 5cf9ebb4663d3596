"""Tiny checkpoints of architectures without a native family."""

from pathlib import Path

from tests.checkpoints import Checkpoint, write_checkpoint

_EXPERTS: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_ROUTED: dict[str, object] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_WINDOWS: dict[str, object] = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

FALLBACK_CHECKPOINTS: dict[str, Checkpoint] = {
    "phi3": Checkpoint("phi3", {"pad_token_id": 0, "sliding_window": 12}),
    "granite": Checkpoint("granite", {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.2}),
    "olmo2": Checkpoint("olmo2"),
    "stablelm": Checkpoint("stablelm", {"hidden_size": 64}),
    "gpt_neox": Checkpoint("gpt_neox"),
    "starcoder2": Checkpoint("starcoder2"),
    "cohere": Checkpoint("cohere", {"logit_scale": 0.3, "tie_word_embeddings": True}),
    "cohere2": Checkpoint("cohere2", _WINDOWS | {"logit_scale": 0.3, "tie_word_embeddings": True}),
    "glm4": Checkpoint("glm4", {"head_dim": 16, "pad_token_id": 0}),
    "smollm3": Checkpoint("smollm3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "qwen3_moe": Checkpoint("qwen3_moe", _EXPERTS | {"head_dim": 16}, max_shard_size="60KB"),
    "mixtral": Checkpoint("mixtral", {"num_local_experts": 4}),
    "gemma3_text": Checkpoint("gemma3_text", _WINDOWS | {"head_dim": 16, "tie_word_embeddings": True}),
    "deepseek_v3": Checkpoint("deepseek_v3", _MLA | _ROUTED),
    "gpt2": Checkpoint("gpt2", {"n_embd": 48, "n_head": 4, "n_layer": 3, "tie_word_embeddings": True}),
    "opt": Checkpoint("opt", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "vaultgemma": Checkpoint(
        "vaultgemma", _WINDOWS | {"head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 12.0}
    ),
}
"""Between them: fused projections, multipliers of every kind, LayerNorm, parallel blocks, partial and missing rotary
embeddings, learned positions, windows, caps, experts that the checkpoint has one by one, values smaller than keys."""


def write(name: str, folder: Path) -> Path:
    write_checkpoint(FALLBACK_CHECKPOINTS[name], folder)
    return folder
