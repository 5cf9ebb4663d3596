"""Writes tiny random float32 checkpoints whose pictures stand at plain positions, each as a line of a table.

Their chat templates have the form of those of the families' own checkpoints.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import transformers
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel, PreTrainedTokenizerFast

from tests.picture_checkpoints import END, PAD, _written, tokenizer

_LIBRARY: Any = transformers
_MODELS: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'SIGN\\n' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Pictures and text in their order, a line's end behind each picture, as in InternVL 3."""
_FIRST = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ 'SIGN' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\\n' + part['text'] }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""All pictures of a turn before its text, as in LLaVA-OneVision."""
_INST = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST]' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] in ['image', 'image_url'] %}{{ 'SIGN' }}"
    "{% else %}{{ raise_exception('Only text and image blocks are supported in message content!') }}{% endif %}"
    "{% endfor %}{% endif %}{{ '[/INST]' }}{% else %}"
    "{{ message['content'] if message['content'] is string else message['content'][0]['text'] }}{% endif %}{% endfor %}"
)
"""As in Mistral Small 3.1."""
_TEXT: Mapping[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
SIGLIP = {**VISION, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, "vision_use_head": False}
PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 112, "patch_size": 8}
_PLACES = [[28, 56], [56, 28], [56, 56], [28, 84]]


@dataclass(frozen=True)
class Plain:
    """A checkpoint of a family.

    Attributes:
        config, text, fields: Name of the class of its configuration, fields of the text half, and other ones.
        pictures, sizes: Of its image processor.
        processor, options: Of its processor.
        sign: What its template writes for a picture.
        placeholder: What features stand at.
        special: Further control tokens.
        named: Attributes of the tokenizer, by name the token.
        ending: Of the name of its image processor in its file.
        logit_scale: Of the text half alone, which transformers' module of the whole leaves out.
    """

    config: str
    text: Mapping[str, Any]
    fields: Mapping[str, Any]
    pictures: str
    sizes: Mapping[str, Any]
    processor: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sign: str = "<image>"
    placeholder: str = ""
    special: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    template: str = _CHATML
    ending: str = ""
    logit_scale: float = 1.0

    def write(self, folder: Path) -> PreTrainedModel:
        """Write it; returns transformers' module."""
        special = (*dict.fromkeys((self.sign, self.placeholder or self.sign, *self.special, *self.named.values())),)
        template = self.template.replace("SIGN", self.sign)
        texts = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer(special, template).backend_tokenizer,
            eos_token=END,
            pad_token=PAD,
            chat_template=template,
            clean_up_tokenization_spaces=False,
            extra_special_tokens=dict(self.named),
        )
        token_id = texts.convert_tokens_to_ids(self.placeholder or self.sign)
        text = {
            **_TEXT,
            "vocab_size": len(texts),
            "eos_token_id": texts.eos_token_id,
            "pad_token_id": texts.pad_token_id,
        }
        config = getattr(_LIBRARY, self.config)(
            text_config={**text, **self.text}, image_token_id=token_id, **{"tie_word_embeddings": False, **self.fields}
        )
        model: PreTrainedModel = _written(folder, _MODELS[type(config)](config), _Files(self, texts))
        return model


@dataclass(frozen=True)
class _Files:
    """What of a checkpoint its processor is read from, in the files of transformers 4, which most checkpoints have."""

    plain: Plain
    tokenizer: PreTrainedTokenizerFast

    def save_pretrained(self, folder: Path) -> None:
        """Write them."""
        self.tokenizer.save_pretrained(folder)
        named = {"processor_class": self.plain.processor}
        pictures = getattr(_LIBRARY, self.plain.pictures + "Pil")(**self.plain.sizes).to_dict()
        pictures["image_processor_type"] = self.plain.pictures + self.plain.ending
        (folder / "preprocessor_config.json").write_text(json.dumps(pictures | named))
        (folder / "processor_config.json").write_text(json.dumps({**self.plain.options, **named}))


QWEN2, LLAMA = {"model_type": "qwen2"}, {"model_type": "llama"}
_MISTRAL = {"model_type": "mistral", "head_dim": 16, "sliding_window": None}
GOT = {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
_INTERN_VISION = {**VISION, "image_size": [32, 32], "patch_size": [8, 8]}
_INTERN_NAMES = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
CLIP = {**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 32}
_NEXT = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}, "image_grid_pinpoints": _PLACES}
NEXT_OPTIONS = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
PIXTRAL_SIZES = {"size": {"longest_edge": 64}, "patch_size": 8}

PLAIN: dict[str, Plain] = {
    "llava_onevision": Plain(
        "LlavaOnevisionConfig",
        QWEN2,
        {"vision_config": SIGLIP, "image_grid_pinpoints": _PLACES, "vision_aspect_ratio": "anyres_max_1"},
        "LlavaOnevisionImageProcessor",
        {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": _PLACES},
        "LlavaOnevisionProcessor",
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_1"},
        special=("<video>",),
        template=_FIRST,
    ),
    "internvl": Plain(
        "InternVLConfig",
        QWEN2,
        {"vision_config": _INTERN_VISION, "image_seq_length": 4},
        "GotOcr2ImageProcessor",
        GOT,
        "InternVLProcessor",
        {"image_seq_length": 4},
        sign="<IMG_CONTEXT>",
        named=_INTERN_NAMES,
        ending="Fast",
    ),
    "mistral3": Plain(
        "Mistral3Config",
        _MISTRAL,
        {"vision_config": PIXTRAL, "spatial_merge_size": 2},
        "PixtralImageProcessor",
        PIXTRAL_SIZES,
        "PixtralProcessor",
        {"patch_size": 8, "spatial_merge_size": 2},
        sign="[IMG]",
        special=("[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"),
        template=_INST,
        ending="Fast",
    ),
    "pixtral": Plain(
        "LlavaConfig",
        _MISTRAL,
        {"vision_config": PIXTRAL, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        "PixtralImageProcessor",
        PIXTRAL_SIZES,
        "PixtralProcessor",
        {"patch_size": 8},
        sign="[IMG]",
        special=("[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"),
        template=_INST,
    ),
    "llava_next_granite": Plain(
        "LlavaNextConfig",
        {"model_type": "granite", "embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.5},
        {"vision_config": CLIP, "image_grid_pinpoints": _PLACES},
        "LlavaNextImageProcessor",
        _NEXT,
        "LlavaNextProcessor",
        NEXT_OPTIONS,
        logit_scale=0.25,
    ),
    "llava_next_video": Plain(
        "LlavaNextVideoConfig",
        LLAMA,
        {"vision_config": CLIP, "image_grid_pinpoints": _PLACES},
        "LlavaNextImageProcessor",
        _NEXT,
        "LlavaNextVideoProcessor",
        NEXT_OPTIONS,
        special=("<video>",),
    ),
}
"""By name."""
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 128,
    "llama_4_scaling_beta": 0.1,
}
PLAIN["ministral3"] = replace(
    PLAIN["mistral3"], text={"model_type": "ministral3", "head_dim": 16, "rope_parameters": _YARN}
)
