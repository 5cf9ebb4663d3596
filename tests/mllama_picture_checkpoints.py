"""Writes a tiny random float32 checkpoint of Llama 3.2 Vision, and says what it is to answer."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    MllamaConfig,
    MllamaForConditionalGeneration,
    MllamaImageProcessorPil,
    MllamaProcessor,
    PreTrainedModel,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

from tests.picture_checkpoints import _written, expected, processor_of, tokenizer

BEGIN, SIGN = "<|begin_of_text|>", "<|image|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|image|>' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NUM_FEATURES = 10
"""Of a tile: 9 patches and one for the whole."""


def write_mllama(folder: Path) -> PreTrainedModel:
    """Two of five layers attend to pictures of up to four tiles; the last layer is one of them."""
    texts = tokenizer((BEGIN, SIGN), TEMPLATE)
    texts.bos_token = BEGIN
    text = MllamaTextConfig(
        vocab_size=len(texts) - 1,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        cross_attention_layers=[1, 4],
        bos_token_id=texts.bos_token_id,
        eos_token_id=texts.eos_token_id,
        pad_token_id=texts.pad_token_id,
    )
    vision = MllamaVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_global_layers=2,
        attention_heads=2,
        image_size=42,
        patch_size=14,
        intermediate_layers_indices=[0, 2],
        vision_output_dim=96,
    )
    token_id = texts.convert_tokens_to_ids(SIGN)
    config = MllamaConfig(vision_config=vision, text_config=text, image_token_index=token_id)
    pictures = MllamaImageProcessorPil(size={"height": 42, "width": 42}, max_image_tiles=4)
    model = _written(folder, MllamaForConditionalGeneration(config), MllamaProcessor(pictures, texts, TEMPLATE))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("attn_gate", "mlp_gate")):
                weight.fill_(0.8)
    model.save_pretrained(folder)
    return model


def answered(
    model: PreTrainedModel, folder: Path, text: str, images: list[Image.Image], num: int
) -> tuple[Any, list[int]]:
    """`expected`, but tokens in front of the first picture see none, as in Meta's own code.

    transformers lets them see all pictures of the prompt, those behind them, too, and also what pads a picture.
    """
    with _as_by_meta(model) if images else ExitStack():
        return expected(model, folder, text, images, num)


@contextmanager
def _as_by_meta(model: PreTrainedModel) -> Iterator[None]:
    masks: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        masks[:] = [kwargs["full_text_row_masked_out_mask"]]

    def masked(module: Any, args: Any, made: Any) -> Any:
        return (masks[0][:, 0] * made[0], *made[1:])

    with ExitStack() as stack:
        for layer in model.get_decoder().layers:
            if hasattr(layer, "cross_attn"):
                stack.callback(layer.register_forward_pre_hook(keep, with_kwargs=True).remove)
                stack.callback(layer.cross_attn.register_forward_hook(masked).remove)
        yield


def logprobs_of(model: PreTrainedModel, folder: Path, text: str, images: list[Image.Image]) -> list[float | None]:
    """Of every token of a prompt but the first, by the rule of `answered`; None for pictures, which are never drawn."""
    made = processor_of(folder)(text=text, images=images, return_tensors="pt")
    with torch.inference_mode(), _as_by_meta(model):
        logprobs = model(**made).logits[0].log_softmax(-1)
    targets = made["input_ids"][0, 1:].tolist()
    return [row[target].item() if target < len(row) else None for row, target in zip(logprobs, targets, strict=False)]
