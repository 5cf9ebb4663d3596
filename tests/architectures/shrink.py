"""Shrinks the default configuration of any architecture of transformers, by the names of its fields.

Sizes are set by name, one value for one meaning. Lists with an entry for each layer keep one layer of each kind, in the
order of the default. What these rules get wrong is corrected in `tests/architectures/exceptions.py`.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

VOCAB_SIZE = 199
MIN_NUM_LAYERS = 2
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers")


def _named(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, int] = {
    **_named(VOCAB_SIZE, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    **_named(64, "hidden_size n_embd d_model emb_dim embedding_dim word_embed_proj_dim attention_hidden_size"),
    **_named(64, "hidden_size_per_layer_input hidden_size_global lru_width"),
    **_named(4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
    **_named(4, "swa_num_attention_heads linear_num_value_heads linear_num_heads"),
    **_named(2, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_query_groups"),
    **_named(16, "head_dim swa_head_dim d_head dim_head kv_channels attention_head_size"),
    **_named(16, "linear_head_dim linear_key_head_dim linear_value_head_dim"),
    **_named(96, "intermediate_size ffn_dim ffn_hidden_size decoder_ffn_dim dff dim_ff d_inner feed_forward_size"),
    **_named(96, "intermediate_size_mlp dense_intermediate_size"),
    **_named(32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
    **_named(32, "shared_experts_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size"),
    **_named(8, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    **_named(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    **_named(2, "n_group num_expert_group"),
    **_named(1, "topk_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    **_named(1, "first_k_dense_replace num_dense_layers"),
    **_named(24, "q_lora_rank"),
    **_named(16, "kv_lora_rank qk_nope_head_dim v_head_dim index_head_dim o_lora_rank"),
    **_named(8, "qk_rope_head_dim rotary_dim"),
    **_named(24, "qk_head_dim"),
    **_named(8, "index_n_heads"),
    **_named(16, "index_topk"),
    **_named(256, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
    **_named(12, "sliding_window sliding_window_size window_size local_attention attention_window_size"),
    **_named(12, "attention_chunk_size"),
    **_named(16, "mamba_d_state state_size ssm_state_size mamba_d_head mamba_head_dim"),
    **_named(8, "mamba_n_heads mamba_num_heads"),
    **_named(4, "time_step_rank mamba_dt_rank"),
    **_named(8, "mamba_chunk_size chunk_size"),
    **_named(16, "query_pre_attn_scalar laurel_rank router_hidden_size"),
    **_named(0, "pad_token_id"),
    **_named(1, "bos_token_id"),
    **_named(2, "eos_token_id eod_token_id decoder_start_token_id"),
}
"""What a field of this name is in a tiny model. A rule changes only a field that has a value by default."""


def shrink(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields to build a tiny configuration of the same class with; nested configurations are shrunk alike."""
    return shrink_fields(config.to_dict())


def shrink_fields(default: Mapping[str, Any]) -> dict[str, Any]:
    """See `shrink`: from the values of a configuration as `to_dict` gives them."""
    small = {name: _small(name, value) for name, value in default.items()}
    changes = {name: value for name, value in small.items() if value != default[name]}
    changes |= _shrink_layers(default)
    if default.get("kv_lora_rank"):
        changes |= _latent(default)
    for name, value in default.items():
        if name.endswith("_config") and isinstance(value, dict):
            changes[name] = shrink_fields(value) | _model_type(value)
    return changes


def _small(name: str, value: Any) -> Any:
    is_size = isinstance(value, int) and not isinstance(value, bool) and (value > 0 or name.endswith("_token_id"))
    if not is_size or name not in SIZES:
        return value
    return SIZES[name] if name.endswith("_token_id") else min(value, SIZES[name])


def _latent(default: Mapping[str, Any]) -> dict[str, Any]:
    """Latent attention has a key head for each head; some classes call the rotary part of it head_dim."""
    changes: dict[str, Any] = {}
    if "num_key_value_heads" in default:
        changes["num_key_value_heads"] = SIZES["num_attention_heads"]
    if "head_dim" in default and default["head_dim"] == default["qk_rope_head_dim"]:
        changes["head_dim"] = SIZES["qk_rope_head_dim"]
    return changes


def _model_type(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": values["model_type"]} if values.get("model_type") else {}


def _shrink_layers(default: Mapping[str, Any]) -> dict[str, Any]:
    """One layer of each kind, at least two: of every list that has an entry for each layer the same entries."""
    field = next((name for name in _NUM_LAYERS if isinstance(default.get(name), int)), None)
    if field is None:
        return {}
    num_layers = default[field]
    lists = {name: value for name, value in default.items() if isinstance(value, list) and len(value) == num_layers}
    kinds: dict[str, int] = {}
    for layer in range(num_layers):
        kinds.setdefault(repr([value[layer] for value in lists.values()]), layer)
    kept = sorted(kinds.values())
    kept += [layer for layer in range(num_layers) if layer not in kept][: max(0, MIN_NUM_LAYERS - len(kept))]
    kept.sort()
    changes: dict[str, Any] = {field: len(kept)} | {
        name: [value[layer] for layer in kept] for name, value in lists.items()
    }
    if default.get("per_layer_config"):
        own = {int(layer): values for layer, values in default["per_layer_config"].items()}
        changes["per_layer_config"] = {kept.index(layer): shrink_fields(own[layer]) for layer in kept if layer in own}
    return changes
