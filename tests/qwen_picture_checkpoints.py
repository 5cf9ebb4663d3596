"""Writes tiny random float32 checkpoints of Qwen's families that see, each with the files that published ones have."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tests.picture_checkpoints import _written, tokenizer

SIGN = "<|vision_start|><|image_pad|><|vision_end|>"
"""What a chat template of Qwen writes for a picture."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "{{ '" + SIGN + "' }}{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Of the form of Qwen2-VL's and Qwen3-VL's."""
_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "shared_expert_intermediate_size": 24,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}


def _text(texts: PreTrainedTokenizerFast, sections: list[int], **fields: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    return {
        "vocab_size": len(texts),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": texts.eos_token_id,
        "pad_token_id": texts.pad_token_id,
        "rope_parameters": rope,
        **fields,
    }


def _write(
    folder: Path, kinds: tuple[type[Any], type[PreTrainedModel]], sections: list[int], text: dict[str, Any], **sees: Any
) -> PreTrainedModel:
    """A feature for a square of 8 pixels, and at most 40 of a picture."""
    texts, (config_type, model_type) = tokenizer(_SPECIAL, TEMPLATE), kinds
    ids = {
        f"{name}_token_id": texts.convert_tokens_to_ids(f"<|{text}|>")
        for name, text in {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start"}.items()
    }
    vision = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, **sees}
    config = config_type(
        text_config=_text(texts, sections, **text),
        vision_config=vision,
        tie_word_embeddings=False,
        vision_end_token_id=texts.convert_tokens_to_ids("<|vision_end|>"),
        **ids,
    )
    pictures = Qwen2VLImageProcessorPil(size={"shortest_edge": 256, "longest_edge": 2560}, patch_size=4)

    def save(folder: Path) -> None:
        pictures.save_pretrained(folder)
        texts.save_pretrained(folder)

    return _written(folder, model_type(config), SimpleNamespace(tokenizer=texts, save_pretrained=save))


def write_qwen2_vl(folder: Path) -> PreTrainedModel:
    sees = {"embed_dim": 16, "hidden_size": 48, "mlp_ratio": 2}
    return _write(folder, (Qwen2VLConfig, Qwen2VLForConditionalGeneration), [2, 2, 2], {}, **sees)


def write_qwen2_5_vl(folder: Path) -> PreTrainedModel:
    """What sees has windows of two by two features."""
    sees = {"hidden_size": 16, "out_hidden_size": 48, "intermediate_size": 24, "window_size": 16}
    kinds = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    return _write(folder, kinds, [1, 2, 3], {}, fullatt_block_indexes=[1], **sees)


_SEES = {"hidden_size": 16, "out_hidden_size": 48, "intermediate_size": 24, "num_position_embeddings": 64}


def write_qwen3_vl(folder: Path) -> PreTrainedModel:
    """Features of two layers of what sees are added to the text half."""
    kinds = Qwen3VLConfig, Qwen3VLForConditionalGeneration
    return _write(folder, kinds, [4, 2, 2], {"head_dim": 16}, deepstack_visual_indexes=[0, 2], **_SEES)


def write_qwen3_vl_moe(folder: Path) -> PreTrainedModel:
    """Features are added behind every layer of the text half, the last one included."""
    kinds, text = (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration), {"head_dim": 16, "num_hidden_layers": 2}
    return _write(folder, kinds, [4, 2, 2], _EXPERTS | text, deepstack_visual_indexes=[0, 1], **_SEES)


def write_qwen3_5(folder: Path) -> PreTrainedModel:
    """Half of a head turns; two layers of four are recurrent."""
    kinds = Qwen3_5Config, Qwen3_5ForConditionalGeneration
    return _write(folder, kinds, [3, 3, 2], _LINEAR | {"head_dim": 32, "partial_rotary_factor": 0.5}, **_SEES)


def write_qwen3_5_moe(folder: Path) -> PreTrainedModel:
    kinds, text = (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration), {"head_dim": 32, "partial_rotary_factor": 0.5}
    return _write(folder, kinds, [3, 3, 2], _LINEAR | _EXPERTS | text, **_SEES)


WRITERS: dict[str, Callable[[Path], PreTrainedModel]] = {
    "qwen2_vl": write_qwen2_vl,
    "qwen2_5_vl": write_qwen2_5_vl,
    "qwen3_vl": write_qwen3_vl,
    "qwen3_vl_moe": write_qwen3_vl_moe,
    "qwen3_5": write_qwen3_5,
    "qwen3_5_moe": write_qwen3_5_moe,
}
