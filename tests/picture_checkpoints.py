"""Writes tiny random float32 checkpoints that see pictures, with transformers' own processors, and makes pictures."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    AutoProcessor,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)

from tests.tokenizers_for_tests import byte_level
from weft.server.pictures.child import processor_of

END, PAD = "<|im_end|>", "<|endoftext|>"
LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""All pictures of a turn before its text, as in LLaVA 1.5."""
IDEFICS_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Pictures and text in their order, as in SmolVLM."""
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}


def tokenizer(special: tuple[str, ...], template: str) -> PreTrainedTokenizerFast:
    """A byte-level one with these control tokens."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def text_config(texts: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(texts),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=texts.eos_token_id,
        pad_token_id=texts.pad_token_id,
    )


def write_llava(folder: Path) -> PreTrainedModel:
    """9 tokens a picture, whatever its size; the features of the last layer but one."""
    texts = tokenizer(("<image>",), LLAVA_TEMPLATE)
    vision = CLIPVisionConfig(**_VISION, image_size=42, patch_size=14, projection_dim=32)
    config = LlavaConfig(
        vision_config=vision, text_config=text_config(texts), image_token_index=texts.convert_tokens_to_ids("<image>")
    )
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 42}, crop_size={"height": 42, "width": 42})
    processor = LlavaProcessor(pictures, texts, patch_size=14, vision_feature_select_strategy="default",
                               num_additional_image_tokens=1, chat_template=LLAVA_TEMPLATE)  # fmt: skip
    return _written(folder, LlavaForConditionalGeneration(config), processor)


def write_idefics3(folder: Path) -> PreTrainedModel:
    """4 tokens a tile: a picture has rows and columns of tiles, and the whole of it in one more."""
    special = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    marks = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    texts = tokenizer(special + marks, IDEFICS_TEMPLATE)
    vision = {**_VISION, "image_size": 32, "patch_size": 8, "model_type": "idefics3_vision"}
    config = Idefics3Config(
        vision_config=vision,
        text_config=text_config(texts).to_dict(),
        scale_factor=2,
        image_token_id=texts.convert_tokens_to_ids("<image>"),
        pad_token_id=texts.pad_token_id,
    )
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = Idefics3Processor(pictures, texts, image_seq_len=4, chat_template=IDEFICS_TEMPLATE)
    return _written(folder, Idefics3ForConditionalGeneration(config), processor)


def write_smolvlm(folder: Path) -> PreTrainedModel:
    """As Idefics 3. Its own processor also reads videos, for which packages are missing here."""
    model = write_idefics3(folder)
    fields = model.config.to_dict()
    config = SmolVLMConfig(**{name: fields[name] for name in fields.keys() - {"model_type", "architectures"}})
    config.vision_config.model_type = "smolvlm_vision"
    processor = AutoProcessor.from_pretrained(folder, backend="pil")
    processor.image_processor = SmolVLMImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    made = _written(folder, SmolVLMForConditionalGeneration(config), processor)
    path = folder / "processor_config.json"
    written = json.loads(path.read_text())
    pictures = written.pop("image_processor") | {"image_processor_type": "SmolVLMImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures | {"processor_class": "SmolVLMProcessor"}))
    path.write_text(json.dumps(written | {"processor_class": "SmolVLMProcessor"}))
    return made


def write_llava_next(folder: Path) -> PreTrainedModel:
    """A picture in up to four parts, and the whole of it; a vector ends each row of it."""
    texts = tokenizer(("<image>",), LLAVA_TEMPLATE)
    vision = CLIPVisionConfig(**_VISION, image_size=28, patch_size=14, projection_dim=32)
    places = [[28, 56], [56, 28], [56, 56]]
    config = LlavaNextConfig(
        vision_config=vision,
        text_config=text_config(texts),
        image_token_index=texts.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=places,
    )
    sizes: dict[str, Any] = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    pictures = LlavaNextImageProcessorPil(image_grid_pinpoints=places, **sizes)
    options: dict[str, Any] = {"patch_size": 14, "vision_feature_select_strategy": "default"}
    processor = LlavaNextProcessor(
        pictures, texts, num_additional_image_tokens=1, chat_template=LLAVA_TEMPLATE, **options
    )
    return _written(folder, LlavaNextForConditionalGeneration(config), processor)


WRITERS: dict[str, Callable[[Path], PreTrainedModel]] = {
    "idefics3": write_idefics3,
    "llava": write_llava,
    "llava_next": write_llava_next,
    "smolvlm": write_smolvlm,
}


def _written(folder: Path, model: PreTrainedModel, processor: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = model.eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.25)
            elif "norm" not in name:
                weight.normal_(0, 0.1)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Coloured areas with noise."""
    draw = np.random.default_rng(seed)
    areas = Image.fromarray(draw.integers(0, 256, (3, 3, 3), np.uint8)).resize((width, height))
    return Image.fromarray(
        np.clip(np.asarray(areas) + draw.integers(-20, 20, (height, width, 3)), 0, 255).astype(np.uint8)
    )


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """The file of a picture."""
    image.save(file := io.BytesIO(), format, **options)
    return file.getvalue()


def expected(
    model: PreTrainedModel, folder: Path, text: str, images: list[Image.Image], num: int
) -> tuple[Any, list[int]]:
    """What transformers' processor makes of a prompt and pictures, and how transformers goes on greedily."""
    made = processor_of(folder)(text=text, images=images or None, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**made, max_new_tokens=num, do_sample=False, use_cache=True)
    return made, ids[0, made["input_ids"].shape[1] :].tolist()
