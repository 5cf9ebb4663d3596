"""Writes tiny random float32 checkpoints of Gemma that see pictures, with transformers' own processors."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessorPil,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

from tests.picture_checkpoints import END, PAD, _written
from tests.tokenizers_for_tests import byte_level

TEMPLATE = (
    "{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ SIGN }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""Pictures and text in their order, as in Gemma 3."""
_TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _tokenizer(image: str, begin: str, end: str, sign: str) -> PreTrainedTokenizerFast:
    backend = byte_level()
    special = (image, begin, end, "<start_of_turn>", "<end_of_turn>", "<|audio|>", "<|audio>", "<audio|>")
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    named = {"image_token": image, "boi_token": begin, "eoi_token": end}
    named |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=named,
        chat_template=TEMPLATE.replace("SIGN", f"'{sign}'"),
        clean_up_tokenization_spaces=False,
    )


def write_gemma3(folder: Path, window: int) -> PreTrainedModel:
    """9 tokens a picture, which see each other in all layers."""
    texts = _tokenizer("<image_soft_token>", "<start_of_image>", "<end_of_image>", "<start_of_image>")
    text = Gemma3TextConfig(
        **_TEXT,
        vocab_size=len(texts),
        sliding_window=window,
        query_pre_attn_scalar=32,
        eos_token_id=texts.eos_token_id,
        pad_token_id=texts.pad_token_id,
    )
    config = Gemma3Config(
        text_config=text,
        tie_word_embeddings=False,
        vision_config=SiglipVisionConfig(**_VISION, image_size=48, patch_size=8),
        mm_tokens_per_image=9,
        boi_token_index=texts.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=texts.convert_tokens_to_ids("<end_of_image>"),
        image_token_index=texts.convert_tokens_to_ids("<image_soft_token>"),
    )
    pictures = Gemma3ImageProcessorPil(size={"height": 48, "width": 48})
    processor = Gemma3Processor(pictures, texts, chat_template=texts.chat_template, image_seq_length=9)
    return _quiet(folder, Gemma3ForConditionalGeneration(config), processor)


def write_gemma4(folder: Path, window: int, sight: str | None = "vision") -> PreTrainedModel:
    """Up to 70 tokens a picture, which see each other in layers with a window if sight says so."""
    texts = _tokenizer("<|image|>", "<|image>", "<image|>", "<|image|>")
    text = Gemma4TextConfig(
        **_TEXT,
        vocab_size=len(texts) + 8,
        vocab_size_per_layer_input=len(texts) + 8,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        global_head_dim=64,
        sliding_window=window,
        use_bidirectional_attention=sight,
        eos_token_id=texts.eos_token_id,
        pad_token_id=texts.pad_token_id,
    )
    config = Gemma4Config(
        text_config=text,
        tie_word_embeddings=False,
        vision_config=Gemma4VisionConfig(
            **_VISION, num_key_value_heads=2, head_dim=16, patch_size=4, position_embedding_size=256
        ),
        audio_config=None,
        boi_token_id=texts.convert_tokens_to_ids("<|image>"),
        eoi_token_id=texts.convert_tokens_to_ids("<image|>"),
        image_token_id=texts.convert_tokens_to_ids("<|image|>"),
        audio_token_id=len(texts),  # which transformers embeds in another way, also where it is generated
        video_token_id=len(texts) + 1,
    )
    pictures = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    return _quiet(folder, Gemma4ForConditionalGeneration(config), _Parts(pictures, texts))


@dataclass
class _Parts:
    """What of Gemma 4's processor reads pictures: the other parts need more packages."""

    pictures: Gemma4ImageProcessorPil
    tokenizer: PreTrainedTokenizerFast

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        content = self.pictures.to_dict() | {"image_processor_type": "Gemma4ImageProcessor"}
        written = {"image_processor": content, "processor_class": "Gemma4Processor"}
        (folder / "processor_config.json").write_text(json.dumps(written, default=str))


def _quiet(folder: Path, model: PreTrainedModel, processor: Any) -> PreTrainedModel:
    """Written with embeddings so small that what tokens see counts more than what they are."""
    _written(folder, model, processor)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.02)
    model.save_pretrained(folder)
    return model


WRITERS: dict[str, Callable[[Path], PreTrainedModel]] = {
    "gemma3, window within a picture": lambda folder: write_gemma3(folder, 5),
    "gemma3, window beyond a picture": lambda folder: write_gemma3(folder, 24),
    "gemma4, window within a picture": lambda folder: write_gemma4(folder, 24),
    "gemma4, window beyond a picture": lambda folder: write_gemma4(folder, 96),
    "gemma4, causal": lambda folder: write_gemma4(folder, 24, None),
}
