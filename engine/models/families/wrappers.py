"""Finds the text half of a checkpoint that also reads images or sounds: it is served alone, as the model that it is.

Such a config.json keeps the fields of the text half in text_config. Older ones of Qwen keep them beside the others.
"""

from collections.abc import Mapping

from weft.engine.fields import Fields

_TEXT_HALVES: Mapping[str, str] = {
    "cohere2": "Cohere2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""Architecture by model_type of a text_config. Of text alone, all three positions of Qwen's are the same."""

_FLAT: Mapping[str, str] = {
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
}

_WRAPPERS = frozenset(
    f"{name}ForConditionalGeneration"
    for name in [
        "Gemma3",
        "Gemma4",
        "Gemma4Unified",
        "Llama4",
        "Llava",
        "LlavaNext",
        "Mistral3",
        "Qwen3VL",
        "Qwen3VLMoe",
        "Qwen3_5",
        "Qwen3_5Moe",
    ]
)
"""Those whose files say all that the text half needs. Others may tie their output head without a word of it."""

_INHERITED = ("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id", "quantization_config")

_LEFT_OUT: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "eos_token_id": 1,
    },
    "gemma4_text": {"eos_token_id": 1},
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
    },
    "llama4_text": {"eos_token_id": 2},
    "ministral3": {"eos_token_id": 2},
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "eos_token_id": 2,
    },
}
"""Fields that a text_config of this model_type leaves out where they are the defaults of transformers' class."""


def text_half(architecture: str, fields: Fields) -> tuple[str, Fields] | None:
    """Architecture and fields of the text half of a checkpoint; None if it has no halves, or an unknown one."""
    text = fields.section("text_config")
    if not text.names():
        return (_FLAT[architecture], fields) if architecture in _FLAT else None
    model_type = text.optional_text("model_type") or ""
    known = _TEXT_HALVES.get(model_type) if architecture in _WRAPPERS else None
    name = architecture if architecture.endswith("ForCausalLM") else known
    return (name, text.inheriting(fields, _INHERITED).with_defaults(_LEFT_OUT.get(model_type, {}))) if name else None
