"""How the parts of models that see are called by llama.cpp and by transformers, for each type of projector.

A record has the names of tensors and makes what transformers' configuration and processor need of the metadata. What a
file does not say is as in the models of that type. Facts: github.com/ggml-org/llama.cpp, `conversion/`, its older
`convert_image_encoder_to_gguf.py`, and `gguf-py/gguf/tensor_mapping.py`.
"""

from collections.abc import Mapping
from dataclasses import replace

from weft.engine.gguf.file import GgufError, GgufModel
from weft.engine.gguf.projector import Json, Projector, flag, number, shown, side, sizes, square
from weft.engine.vision.families import SEEING

_SIGLIP = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


def _embeddings(tower: str) -> dict[str, str]:
    names = {"patch_embd": "patch_embedding", "position_embd": "position_embedding"}
    return {f"v.{name}": f"model.{tower}.embeddings.{own}" for name, own in names.items()}


def _llava(file: GgufModel) -> Json:
    """The file has no layer behind the one whose outputs are the features."""
    if (layers := file.metadata.get("clip.vision.feature_layer")) is not None:
        raise GgufError(f"{file.files[0].name}: features of layers {layers} are not supported, only of the last one")
    act = "gelu" if flag(file, "use_gelu") else "quick_gelu"
    vision = sizes(file, model_type="clip_vision_model", hidden_act=act)
    return {"vision_config": vision, "vision_feature_layer": -1, "vision_feature_select_strategy": "default"}


def _llava_processor(file: GgufModel) -> tuple[Json, Json]:
    pictures = shown(file, "CLIPImageProcessor", {"shortest_edge": number(file, "image_size")}, crop_size=square(file))
    parts = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return pictures, {"patch_size": number(file, "patch_size"), **parts}


_LAST_NORM = "model.vision_tower.post_layernorm"
_LLAVA = Projector(
    architecture="LlavaForConditionalGeneration",
    model_type="llava",
    texts={"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"},
    tokens=("<image>",),
    layer="model.vision_tower.encoder.layers.{}.",
    leaves=_SIGLIP,
    others={
        **_embeddings("vision_tower"),
        "v.class_embd": "model.vision_tower.embeddings.class_embedding",
        "v.pre_ln": "model.vision_tower.pre_layrnorm",
        "mm.0": "model.multi_modal_projector.linear_1",
        "mm.2": "model.multi_modal_projector.linear_2",
    },
    output="mm.2.weight",
    config=_llava,
    processor=_llava_processor,
    unused={f"{_LAST_NORM}.{end}": f"model.vision_tower.pre_layrnorm.{end}" for end in ("weight", "bias")},
    spare_token=True,
)


def _pinpoints(file: GgufModel) -> list[list[int]]:
    flat = file.values("clip.vision.image_grid_pinpoints", int)
    if not flat or len(flat) % 2:
        raise GgufError(
            f"{file.files[0].name}: clip.vision.image_grid_pinpoints must have pairs, got {len(flat)} values"
        )
    return [[width, height] for width, height in zip(flat[::2], flat[1::2], strict=True)]


def _llava_next_processor(file: GgufModel) -> tuple[Json, Json]:
    pictures, others = _llava_processor(file)
    of_next = {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": _pinpoints(file)}
    return pictures | of_next, others


_LLAVA_NEXT = replace(
    _LLAVA,
    architecture="LlavaNextForConditionalGeneration",
    model_type="llava_next",
    others={**_LLAVA.others, "model.image_newline": "model.image_newline"},
    config=lambda file: _llava(file) | {"image_grid_pinpoints": _pinpoints(file)},
    processor=_llava_next_processor,
)


def _idefics3(file: GgufModel) -> Json:
    vision = sizes(file, model_type="idefics3_vision", hidden_act="gelu_pytorch_tanh")
    return {"vision_config": vision, "scale_factor": number(file, "projector.scale_factor", 2)}


def _idefics3_processor(file: GgufModel) -> tuple[Json, Json]:
    size = number(file, "image_size")
    longest = {"longest_edge": number(file, "preproc_image_size", 4 * size)}
    pictures = shown(file, "Idefics3ImageProcessor", longest, max_image_size={"longest_edge": size})
    patches = (size // number(file, "patch_size")) ** 2
    return pictures, {"image_seq_len": patches // number(file, "projector.scale_factor", 2) ** 2}


_IDEFICS3 = Projector(
    architecture="Idefics3ForConditionalGeneration",
    model_type="idefics3",
    texts={"llama": "llama"},
    tokens=("<image>", "<fake_token_around_image>"),
    layer="model.vision_model.encoder.layers.{}.",
    leaves=_SIGLIP,
    others={
        **_embeddings("vision_model"),
        "v.post_ln": "model.vision_model.post_layernorm",
        "mm.model.fc": "model.connector.modality_projection.proj",
    },
    output="mm.model.fc.weight",
    config=_idefics3,
    processor=_idefics3_processor,
)


def _gemma3(file: GgufModel) -> Json:
    vision = sizes(file, model_type="siglip_vision_model", hidden_act="gelu_pytorch_tanh", vision_use_head=False)
    return {"vision_config": vision, "mm_tokens_per_image": side(file, 4) ** 2}


_GEMMA3 = Projector(
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    texts={"gemma3": "gemma3_text"},
    tokens=("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    layer="model.vision_tower.encoder.layers.{}.",
    leaves=_SIGLIP,
    others={
        **_embeddings("vision_tower"),
        "v.post_ln": "model.vision_tower.post_layernorm",
        "mm.input_projection.weight": "model.multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm": "model.multi_modal_projector.mm_soft_emb_norm",
    },
    output="mm.input_projection.weight",
    output_is_last=True,
    config=_gemma3,
    processor=lambda file: (
        shown(file, "Gemma3ImageProcessor", square(file)),
        {"image_seq_length": side(file, 4) ** 2},
    ),
    ids={"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
    roles={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    less={"mm.soft_emb_norm.weight": 1.0},
)


def _qwen(file: GgufModel) -> Json:
    depth, heads = number(file, "block_count"), number(file, "attention.head_count")
    return {"depth": depth, "num_heads": heads, "patch_size": number(file, "patch_size")}


def _qwen2(file: GgufModel) -> Json:
    """What files say of the feed-forward is the size of the text half, or nothing."""
    size, wide = number(file, "embedding_length"), file.tensors.get("v.blk.0.ffn_up.weight")
    more = {"embed_dim": size, "hidden_size": _outputs(file), "mlp_ratio": max(wide.shape) // size if wide else 4}
    return {"vision_config": _qwen(file) | more | {"hidden_act": "quick_gelu"}}


def _outputs(file: GgufModel) -> int:
    return file.tensors["mm.2.weight"].shape[0]


def _qwen2_5(file: GgufModel) -> Json:
    every = number(file, "n_wa_pattern")
    vision = _qwen(file) | {
        "hidden_size": number(file, "embedding_length"),
        "intermediate_size": number(file, "feed_forward_length"),
        "out_hidden_size": _outputs(file),
        "hidden_act": "silu",
        "window_size": number(file, "window_size", 112),
        "fullatt_block_indexes": list(range(every - 1, number(file, "block_count"), every)),
    }
    return {"vision_config": vision}


def _qwen_processor(file: GgufModel) -> tuple[Json, Json]:
    least, most = number(file, "image_min_pixels", 56 * 56), number(file, "image_max_pixels", 12_845_056)
    size = {"shortest_edge": least, "longest_edge": most}
    return shown(file, "Qwen2VLImageProcessor", size, patch_size=number(file, "patch_size")), {}


_QWEN2_LEAVES = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_q": "attn.qkv",
    "attn_k": "attn.qkv",
    "attn_v": "attn.qkv",
    "attn_out": "attn.proj",
}
_QWEN2 = Projector(
    architecture="Qwen2VLForConditionalGeneration",
    model_type="qwen2_vl",
    texts={"qwen2vl": "qwen2_vl_text"},
    tokens=("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    layer="model.visual.blocks.{}.",
    leaves={**_QWEN2_LEAVES, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    others={
        "v.patch_embd.weight": "model.visual.patch_embed.proj.weight",
        "v.patch_embd.weight.1": "model.visual.patch_embed.proj.weight",
        "v.post_ln": "model.visual.merger.ln_q",
        "mm.0": "model.visual.merger.mlp.0",
        "mm.2": "model.visual.merger.mlp.2",
    },
    output="mm.2.weight",
    config=_qwen2,
    processor=_qwen_processor,
    ids={
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "video_token_id": "<|video_pad|>",
    },
)
_QWEN2_5 = replace(
    _QWEN2,
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_type="qwen2_5_vl",
    texts={"qwen2vl": "qwen2_5_vl_text"},
    leaves={**_QWEN2_LEAVES, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    config=_qwen2_5,
)


def _mistral3(file: GgufModel) -> Json:
    act = "silu" if flag(file, "use_silu") else "gelu"
    vision = sizes(file, model_type="pixtral", hidden_act=act, rope_theta=10_000.0)
    merge = number(file, "spatial_merge_size")
    has_bias = {"multimodal_projector_bias": "mm.1.bias" in file.tensors}
    return {"vision_config": vision, "spatial_merge_size": merge, "vision_feature_layer": -1, **has_bias}


def _mistral3_processor(file: GgufModel) -> tuple[Json, Json]:
    size, patch = {"longest_edge": number(file, "image_size")}, number(file, "patch_size")
    parts = {"patch_size": patch, "spatial_merge_size": number(file, "spatial_merge_size")}
    return shown(file, "PixtralImageProcessor", size, patch_size=patch), {**parts}


_MISTRAL3 = Projector(
    architecture="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    texts={"llama": "mistral"},
    tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    layer="model.vision_tower.transformer.layers.{}.",
    leaves={
        "ln1": "attention_norm",
        "ln2": "ffn_norm",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_out": "attention.o_proj",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    others={
        "v.patch_embd": "model.vision_tower.patch_conv",
        "v.pre_ln": "model.vision_tower.ln_pre",
        "mm.input_norm": "model.multi_modal_projector.norm",
        "mm.patch_merger": "model.multi_modal_projector.patch_merger.merging_layer",
        "mm.1": "model.multi_modal_projector.linear_1",
        "mm.2": "model.multi_modal_projector.linear_2",
    },
    output="mm.2.weight",
    config=_mistral3,
    processor=_mistral3_processor,
    has_halves=True,
    left_out=("v.token_embd.img_break",),  # which is in the text half, too
)


def _internvl(file: GgufModel) -> Json:
    vision = sizes(file, model_type="internvl_vision", hidden_act="gelu")
    vision["attention_bias"] = "v.blk.0.attn_q.bias" in file.tensors
    return {"vision_config": vision, "downsample_ratio": 1 / number(file, "projector.scale_factor")}


def _internvl_processor(file: GgufModel) -> tuple[Json, Json]:
    tiles = {f"{end}_patches": number(file, f"preproc_{end}_tiles", of) for end, of in (("min", 1), ("max", 12))}
    pictures = shown(file, "GotOcr2ImageProcessor", square(file), crop_to_patches=True, **tiles)
    return pictures, {"image_seq_length": side(file) ** 2}


_INTERNVL = Projector(
    architecture="InternVLForConditionalGeneration",
    model_type="internvl",
    texts={"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama"},
    tokens=("<IMG_CONTEXT>", "<img>", "</img>"),
    layer="model.vision_tower.encoder.layer.{}.",
    leaves={
        "ln1": "layernorm_before",
        "ln2": "layernorm_after",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_out": "attention.projection_layer",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
        "ls1.weight": "lambda_1",
        "ls2.weight": "lambda_2",
    },
    others={
        "v.class_embd": "model.vision_tower.embeddings.cls_token",
        "v.position_embd.weight": "model.vision_tower.embeddings.position_embeddings",
        "v.patch_embd": "model.vision_tower.embeddings.patch_embeddings.projection",
        "mm.model.mlp.0": "model.multi_modal_projector.layer_norm",
        "mm.model.mlp.1": "model.multi_modal_projector.linear_1",
        "mm.model.mlp.3": "model.multi_modal_projector.linear_2",
    },
    batched=tuple(f"model.vision_tower.embeddings.{name}" for name in ("cls_token", "position_embeddings")),
    output="mm.model.mlp.3.weight",
    config=_internvl,
    processor=_internvl_processor,
    roles={
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    },
)

_PROJECTORS: Mapping[str, Projector] = {
    "mlp": _LLAVA,
    "idefics3": _IDEFICS3,
    "gemma3": _GEMMA3,
    "qwen2vl_merger": _QWEN2,
    "qwen2.5vl_merger": _QWEN2_5,
    "pixtral": _MISTRAL3,
    "internvl": _INTERNVL,
}


def projector_of(file: GgufModel) -> Projector:
    """The record of a file's type.

    Raises:
        GgufError: It is no such file, or of a type that is not supported.
    """
    name = file.files[0].name
    if (family := file.optional("general.architecture", str)) != "clip":
        raise GgufError(f"{name} is no file of a projector for pictures: its architecture is {family}, not clip")
    kind = file.optional("clip.projector_type", str) or file.optional("clip.vision.projector_type", str)
    if kind is None and file.optional("clip.has_llava_projector", bool):
        kind = "mlp"  # the oldest files
    projector = _PROJECTORS.get(kind or "")
    if projector is _LLAVA and str(file.metadata.get("clip.vision.mm_patch_merge_type")).startswith("spatial"):
        projector = _LLAVA_NEXT
    if projector is None or projector.architecture not in SEEING:
        known = ", ".join(each for each, record in _PROJECTORS.items() if record.architecture in SEEING)
        raise GgufError(f"{name}: projectors of type {kind} are not supported (supported: {known})")
    return projector
