"""Writes what sees in a checkpoint as an mmproj file, as llama.cpp's converters do, and its text half beside it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests import gguf_files
from tests.picture_checkpoints import WRITERS, processor_of

Named = Iterator[tuple[str, torch.Tensor]]
_SEEING = re.compile("vision|visual|multi_modal|connector|image_newline")


@dataclass(frozen=True)
class Written:
    """What a converter makes of a family.

    Attributes:
        projector: The type.
        text: The architecture of the text half's file.
        metadata: Without `clip.`, beside what every file has.
        convert: Names and values of a tensor in the file; nothing for one that it leaves out.
        changes: See `gguf_files.write`.
    """

    projector: str
    text: str
    metadata: Mapping[str, Any]
    convert: Callable[[str, torch.Tensor], Named]
    changes: Mapping[str, Any] = field(default_factory=dict)


def by_name(name: str, tensor: torch.Tensor) -> Named:
    """As the table of the `gguf` package has it, which knows names of older checkpoints."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 9)
    bare = name.removeprefix("model.")
    tried = (name, bare, bare.replace("vision_tower.", "vision_tower.vision_model."))
    found = next(filter(None, (table.get_name(each, (".weight", ".bias")) for each in tried)), None)
    assert found, name
    yield found, tensor


_OF_CLIP = {
    "class_embedding": "v.class_embd",
    "patch_embedding": "v.patch_embd",
    "position_embedding": "v.position_embd",
    "pre_layrnorm": "v.pre_ln",
    "linear_1": "mm.0",
    "linear_2": "mm.2",
    "image_newline": "model.image_newline",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "out_proj": "attn_out",
    "fc1": "ffn_down",
    "fc2": "ffn_up",
}


def of_clip(name: str, tensor: torch.Tensor) -> Named:
    """The oldest converter, for LLaVA: the last layer stays behind, and two names are in each other's place."""
    if "layers.2." in name or "post_layernorm" in name:
        return
    stem, dot, end = name.rpartition(".") if name.endswith(("weight", "bias")) else (name, "", "")
    own = _OF_CLIP[stem.rpartition(".")[2]]
    layer = re.search(r"layers\.(\d+)", name)
    yield f"{f'v.blk.{layer[1]}.' if layer else ''}{own}{dot}{end}", tensor


def of_gemma3(name: str, tensor: torch.Tensor) -> Named:
    if "head." not in name:
        yield from by_name(name.replace("_weight", ".weight"), tensor + 1 if "soft_emb_norm" in name else tensor)


def of_qwen(name: str, tensor: torch.Tensor) -> Named:
    if ".qkv." in name:
        for each, part in zip("qkv", tensor.chunk(3), strict=True):
            yield from by_name(name.replace("qkv", each), part)
    elif "patch_embed.proj.weight" in name:
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
    else:
        yield from by_name(name, tensor)


def of_pixtral(name: str, tensor: torch.Tensor) -> Named:
    if re.search(r"[qk]_proj", name):
        tensor = tensor.view(2, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
    yield from by_name(name, tensor)


def of_internvl(name: str, tensor: torch.Tensor) -> Named:
    of_projector = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
    if found := re.search(r"multi_modal_projector\.(\w+)\.(\w+)", name):
        name = f"{of_projector[found[1]]}.{found[2]}"
    else:
        name = f"model.{name.removeprefix('model.')}"
    yield from by_name(f"{name}.weight" if re.search(r"lambda_\d|position_embeddings", name) else name, tensor)


def write_mmproj(
    base: Path, file: Path, written: Written, kind: Kind = Kind.F32, metadata: Mapping[str, Any] = {}
) -> None:
    """The file of a checkpoint; matrices in layers are of this type if their rows are whole blocks."""
    writer = gguf.GGUFWriter(file, str(metadata.get("general.architecture", "clip")))
    of_all = {"has_vision_encoder": True, "projector_type": written.projector}
    of_all |= {"vision.image_mean": [0.5] * 3, "vision.image_std": [0.25] * 3}
    of_all |= {"vision.attention.layer_norm_epsilon": 1e-5}
    for name, value in {**of_all, **written.metadata, **metadata}.items():
        key = f"clip.{name}"
        if name == "general.architecture":
            continue
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, tensor in load_file(base / "model.safetensors").items():
        if not _SEEING.search(name):
            continue
        for own, values in written.convert(name, tensor):
            is_in_kind = ".blk." in own and values.dim() == 2 and values.shape[1] % 32 == 0
            own_kind = kind if is_in_kind else Kind.F32
            data = gguf.quantize(values.contiguous().numpy(), own_kind)
            writer.add_tensor(own, data, raw_dtype=own_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_text(
    half: PreTrainedModel,
    texts: PreTrainedTokenizerFast,
    folder: Path,
    written: Written,
    renamed: Mapping[str, str] = {},
) -> Path:
    """The file of a text half, in float32, with the tokenizer of the whole, in which some tokens have other names."""
    half.save_pretrained(folder / "base")
    told = texts.backend_tokenizer.to_str()
    for old, new in renamed.items():
        told = told.replace(f'"{old}"', f'"{new}"')
    options = {"chat_template": texts.chat_template or "", "tokenizer": json.loads(told), **written.changes}
    return gguf_files.write(folder / "base", folder, written.text, lambda name: Kind.F32, **options)[0]


def text_half(model: PreTrainedModel) -> PreTrainedModel:
    """That of a model that sees, alone."""
    half: PreTrainedModel = AutoModelForCausalLM.from_config(model.config.get_text_config())
    half.model.load_state_dict(model.get_decoder().state_dict())
    half.lm_head.load_state_dict(model.get_output_embeddings().state_dict())
    return half


SIZES = {
    "vision.embedding_length": 32,
    "vision.feed_forward_length": 48,
    "vision.block_count": 3,
    "vision.attention.head_count": 2,
    "vision.projection_dim": 48,
}
_CLIP = {
    **SIZES,
    "vision.block_count": 2,
    "vision.image_size": 42,
    "vision.patch_size": 14,
    "vision.image_mean": [0.48145466, 0.4578275, 0.40821073],
    "vision.image_std": [0.26862954, 0.26130258, 0.27577711],
}
_NEXT = {
    **_CLIP,
    "vision.image_size": 28,
    "vision.mm_patch_merge_type": "spatial_unpad",
    "vision.image_grid_pinpoints": [28, 56, 56, 28, 56, 56],
}
_IDEFICS = {
    **SIZES,
    "vision.image_size": 32,
    "vision.patch_size": 8,
    "vision.image_std": [0.5] * 3,
    "vision.projector.scale_factor": 2,
    "vision.preproc_image_size": 64,
    "use_gelu": True,
}
WITH_PROCESSORS = {
    "idefics3": Written("idefics3", "llama", _IDEFICS, by_name),
    "llava": Written("mlp", "llama", _CLIP, of_clip),
    "llava_next": Written("mlp", "llama", _NEXT, of_clip),
}
"""Of checkpoints in `WRITERS`, with what their processors do."""


def write_halves(name: str, folder: Path, renamed: Mapping[str, str] = {}) -> tuple[PreTrainedModel, Path, Path]:
    """A model, whose checkpoint is in `whole`, and the files of its halves: model.gguf and mmproj.gguf."""
    model = WRITERS[name](folder / "whole")
    texts: PreTrainedTokenizerFast = processor_of(folder / "whole").tokenizer
    file = write_text(text_half(model), texts, folder, WITH_PROCESSORS[name], renamed)
    write_mmproj(folder / "whole", folder / "mmproj.gguf", WITH_PROCESSORS[name])
    return model, file, folder / "mmproj.gguf"
