"""What sees out of mmproj files: features are those of transformers for every type, and what is refused is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from tests.mmproj_files import Written, by_name, of_clip, of_gemma3, of_internvl, of_pixtral, of_qwen, text_half, write_mmproj, write_text
from tests.picture_checkpoints import WRITERS, picture, processor_of, tokenizer
from weft.engine.fallback.vision import load_encoder
from weft.engine.gguf.file import GgufError
from weft.engine.gguf.folder import made_folder
from weft.engine.gguf.mmproj import choose_mmproj, mmproj_beside
from weft.engine.vision.families import SEEING, SeeingFamily

CPU, F32 = torch.device("cpu"), torch.float32
SIZES = {
    "vision.embedding_length": 32,
    "vision.feed_forward_length": 48,
    "vision.block_count": 3,
    "vision.attention.head_count": 2,
    "vision.projection_dim": 48,
}
CLIP = {**SIZES, "vision.block_count": 2, "vision.image_size": 42, "vision.patch_size": 14, "has_llava_projector": True}
NEXT = {
    **CLIP,
    "vision.image_size": 28,
    "vision.mm_patch_merge_type": "spatial_unpad",
    "vision.image_grid_pinpoints": [28, 56, 56, 28, 56, 56],
}
IDEFICS = {
    **SIZES,
    "vision.image_size": 32,
    "vision.patch_size": 8,
    "vision.projector.scale_factor": 2,
    "vision.preproc_image_size": 64,
    "use_gelu": True,
}
SMALL = {**SIZES, "vision.image_size": 32, "vision.patch_size": 8}
QWEN = {**SIZES, "vision.image_size": 560, "vision.patch_size": 14}
SECTIONS = {"rope.dimension_sections": [2, 2, 2, 0]}
WRITTEN = {
    "llava": Written("mlp", "llama", CLIP, of_clip),
    "llava_next": Written("mlp", "llama", NEXT, of_clip),
    "idefics3": Written("idefics3", "llama", IDEFICS, by_name),
    "gemma3": Written("gemma3", "gemma3", {**SMALL, "vision.projector.scale_factor": 2}, of_gemma3),
    "qwen2_vl": Written("qwen2vl_merger", "qwen2vl", QWEN, of_qwen, SECTIONS),
    "qwen2_5_vl": Written("qwen2.5vl_merger", "qwen2vl", {**QWEN, "vision.n_wa_pattern": 2, "use_silu": True}, of_qwen, SECTIONS),
    "mistral3": Written(
        "pixtral", "llama", {**SMALL, "vision.spatial_merge_size": 2, "use_silu": True}, of_pixtral
    ),
    "internvl": Written("internvl", "qwen2", {**SMALL, "vision.projector.scale_factor": 2}, of_internvl),
}
TOKENS = {
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>"),
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "layer_norm_eps": 1e-5,
}
OF_QWEN: dict[str, Any] = {"depth": 3, "num_heads": 2}
TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}


def model_of(name: str, vocab_size: int) -> PreTrainedModel:
    """A tiny random one; its text half is of no use."""
    text = TEXT | {"vocab_size": vocab_size}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}
    siglip = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
    match name:
        case "gemma3":
            gemma = Gemma3Config(vision_config=siglip, text_config=text, mm_tokens_per_image=4)
            return Gemma3ForConditionalGeneration(gemma)
        case "qwen2_vl":
            vision = {**OF_QWEN, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2}
            return Qwen2VLForConditionalGeneration(Qwen2VLConfig(vision_config=vision, text_config=text | rope))
        case "qwen2_5_vl":
            vision = {**OF_QWEN, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48}
            vision |= {"fullatt_block_indexes": [1]}
            return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=vision, text_config=text | rope))
        case "mistral3":
            vision = {**VISION, "model_type": "pixtral", "hidden_act": "silu"}
            mistral = Mistral3Config(vision_config=vision, text_config={**text, "model_type": "mistral"})
            return Mistral3ForConditionalGeneration(mistral)
    vision = {**VISION, "model_type": "internvl_vision", "attention_bias": True}
    return InternVLForConditionalGeneration(
        InternVLConfig(vision_config=vision, text_config={**text, "model_type": "qwen2"}, downsample_ratio=0.5)
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(name: str, folder: Path, kind: Kind = Kind.F32, **metadata: Any) -> tuple[PreTrainedModel, Path, Path]:
    """A model, and the files of its halves."""
    torch.manual_seed(0)
    if name in WRITERS:
        model = WRITERS[name](folder / "whole")
        texts: PreTrainedTokenizerFast = processor_of(folder / "whole").tokenizer
        file = write_text(text_half(model), texts, folder, WRITTEN[name])
    else:
        texts = tokenizer(TOKENS[name], "")
        model = model_of(name, len(texts)).eval().float()
        for parameter_name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, "norm" in parameter_name, 0.25)
        model.save_pretrained(folder / "whole")
        kinds = {"gemma3": Gemma3TextConfig, "llama": LlamaConfig}
        config = kinds.get(WRITTEN[name].text, Qwen2Config)(**TEXT, vocab_size=len(texts))
        file = write_text(AutoModelForCausalLM.from_config(config), texts, folder, WRITTEN[name])
    write_mmproj(folder / "whole", folder / "mmproj.gguf", WRITTEN[name], kind, metadata)
    return model, file, folder / "mmproj.gguf"


@pytest.mark.parametrize("name", WRITTEN)
def test_features_are_those_of_transformers(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file, mmproj = written(name, tmp_path)
    for architecture in model.config.architectures:
        monkeypatch.setitem(SEEING, architecture, SEEING.get(architecture, SeeingFamily()))  # type: ignore[arg-type]
    folder = made_folder(file, mmproj)
    pictures = AutoImageProcessor.from_pretrained(folder, backend="pil")
    made = pictures(images=[picture(1, 80, 50)], return_tensors="pt")
    arrays = {each: made[each] for each in made if each in ("pixel_values", "image_sizes", "image_grid_thw")}
    with torch.inference_mode():
        expected = model.model.get_image_features(**arrays).pooler_output
        features = load_encoder(folder, CPU, F32)(arrays)
    expected = torch.cat([part.reshape(-1, part.shape[-1]) for part in expected])
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-4)
