"""Turns the metadata of a GGUF file into a config.json, and the names of its tensors into those of Hugging Face.

What llama.cpp's converter changed is noted with each tensor, for the engine to undo: the rows of Llama's queries and
keys are in another order, and Gemma's norms have 1 added. Facts: github.com/ggml-org/llama.cpp,
`convert_hf_to_gguf.py` and `gguf-py/gguf/constants.py`.
"""

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.engine.gguf.file import GgufError, GgufModel, GgufTensor

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LEAVES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_GEMMA2 = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that belong to the configuration."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How llama.cpp writes a family.

    Attributes:
        name: Of the architecture in config.json.
        fields: What its config.json has beside the common fields.
        leaves: Names of a layer's tensors that differ from `_LEAVES`.
        permutes: Whether the rows of queries and keys are in another order.
        norm_offset: What was added to the weights of norms.
    """

    name: str
    fields: Callable[[GgufModel], dict[str, object]]
    leaves: Mapping[str, str] = field(default_factory=dict)
    permutes: bool = False
    norm_offset: float = 0.0


def describe(model: GgufModel, versions: Sequence[str]) -> dict[str, object]:
    """The config.json; its quantization_config has the place of each tensor under its name in Hugging Face layout.

    Args:
        versions: Size and time of each file, by which the engine sees that places are not those of a newer file.

    Raises:
        GgufError: The architecture is not supported, or a value is missing.
    """
    family = model.value("general.architecture", str)
    if family not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise GgufError(f"GGUF files of architecture {family} are not supported (supported: {supported}). Take the "
                        "model's safetensors")  # fmt: skip
    num_layers = model.value("[ARCH].block_count", int)
    if not 0 < num_layers <= len(model.tensors):
        raise GgufError(f"block_count is {num_layers:,}, and the file has {len(model.tensors):,} tensors")
    if model.optional("[ARCH].attention.causal", bool) is False:
        raise GgufError("models whose attention is not causal are not supported as GGUF files. Take the safetensors")
    num_experts = model.optional("[ARCH].expert_count", int) or 0
    architecture = _MIXTURE if family == "llama" and num_experts else _ARCHITECTURES[family]
    matrices = [tensor.kind for tensor in model.tensors.values() if len(tensor.shape) > 1]
    num_heads, num_kv_heads, head_dim = _heads(model)
    config: dict[str, object] = {
        "architectures": [architecture.name],
        "vocab_size": _embedding(model).shape[0],
        "hidden_size": model.value("[ARCH].embedding_length", int),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": _of_all_layers(model, "[ARCH].feed_forward_length", 0),
        "max_position_embeddings": model.value("[ARCH].context_length", int),
        "rms_norm_eps": _epsilon(model),
        "rope_theta": model.optional("[ARCH].rope.freq_base", float) or 10_000.0,
        "rope_scaling": _rope_scaling(model),
        "rotary_dim": model.optional("[ARCH].rope.dimension_count", int) or head_dim,
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "dtype": "float32" if set(matrices) == {"F32"} else "bfloat16",
    }
    names = {name: _name(name, architecture) for name in model.tensors if name not in _FACTORS}
    tensors = {
        names[name]: _place(model, name, tensor, architecture, num_heads, num_kv_heads, num_experts)
        for name, tensor in model.tensors.items()
        if name in names
    }
    files = [str(file) for file in model.files]
    quantization = {"quant_method": "gguf", "files": files, "versions": versions, "tensors": tensors}
    return config | architecture.fields(model) | {"quantization_config": quantization}


def _name(name: str, architecture: _Architecture) -> str:
    """That of Hugging Face layouts; an unknown one stays, and is refused if nothing asks for it."""
    if found := _LAYER.fullmatch(name):
        index, leaf, ending = found.groups()
        if leaf == "attn_sinks":
            return f"model.layers.{index}.self_attn.sinks"
        leaf = architecture.leaves.get(leaf) or _LEAVES.get(leaf, leaf)
        return f"model.layers.{index}.{leaf}.{ending}"
    stem, _, ending = name.rpartition(".")
    return f"{_TOP[stem]}.{ending}" if stem in _TOP else name


def _place(
    model: GgufModel,
    name: str,
    tensor: GgufTensor,
    architecture: _Architecture,
    heads: int,
    kv_heads: int,
    experts: int,
) -> dict[str, object]:
    """Where a tensor lies and what has to be undone."""
    shape, leaf = list(tensor.shape), name.rpartition(".")[0].rpartition(".")[2]
    if leaf.endswith("_exps") and shape[0] != experts:
        raise GgufError(f"tensor {name} has {shape[0]} experts, expert_count is {experts}")
    if leaf == "ffn_gate_inp_shexp":
        shape = [1, shape[-1]]
    place = {"type": tensor.kind, "file": model.files.index(tensor.file), "offset": tensor.offset, "shape": shape}
    place["row_bytes"] = tensor.row_bytes
    if architecture.permutes and leaf in ("attn_q", "attn_k"):
        place["heads"] = num_heads = heads if leaf == "attn_q" else kv_heads
        if shape[0] % (2 * num_heads):
            raise GgufError(f"tensor {name} has {shape[0]} rows for {num_heads} heads")
    if architecture.norm_offset and leaf.endswith("_norm"):
        place["less"] = architecture.norm_offset
    return place


def _embedding(model: GgufModel) -> GgufTensor:
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError("the file has no embedding (token_embd.weight)")
    return embedding


def _of_all_layers(model: GgufModel, key: str, default: int | None = None) -> int:
    """A number, or a list of the same number for each layer."""
    name = key.replace("[ARCH]", _family(model))
    value = model.metadata.get(name, default)
    values = set(value) if isinstance(value, list) else {value}
    if len(values) > 1:
        raise GgufError(f"{name} differs between layers, which is not supported")
    return model.value(key, int) if values in (set(), {None}) else _integer(name, values.pop())


def _integer(name: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise GgufError(f"{name} must be a number from 0 on, got {value!r}")
    return value


def _heads(model: GgufModel) -> tuple[int, int, int]:
    """Query heads, key-value heads, and values of each."""
    num_heads = _of_all_layers(model, "[ARCH].attention.head_count")
    num_kv_heads = _of_all_layers(model, "[ARCH].attention.head_count_kv", num_heads)
    given = model.optional("[ARCH].attention.key_length", int)
    if (of_values := model.optional("[ARCH].attention.value_length", int)) not in (None, given):
        raise GgufError(f"attention.value_length {of_values} is not attention.key_length, which is not supported")
    head_dim = given or model.value("[ARCH].embedding_length", int) // max(1, num_heads)
    if min(num_heads, num_kv_heads, head_dim) < 1:
        raise GgufError(f"attention cannot have {num_heads} heads of {head_dim} values over {num_kv_heads}")
    return num_heads, num_kv_heads, head_dim


def _epsilon(model: GgufModel) -> float:
    given = model.optional("[ARCH].attention.layer_norm_rms_epsilon", float)
    return model.value("[ARCH].attention.layer_norm_epsilon", float) if given is None else given


def _rope_scaling(model: GgufModel) -> dict[str, object] | None:
    """As config.json has it. Llama 3's is in the file as a factor for each frequency, which is what LongRoPE has."""
    longest = model.value("[ARCH].context_length", int)
    original = model.optional("[ARCH].rope.scaling.original_context_length", int) or longest
    factor, attention = (model.optional(f"[ARCH].rope.scaling.{name}", float) for name in ("factor", "attn_factor"))
    factor = factor or model.optional("[ARCH].rope.scale_linear", float)  # as old files name it
    kind = model.optional("[ARCH].rope.scaling.type", str) or ("linear" if factor else "none")
    if "rope_freqs.weight" in model.tensors:
        factors = _numbers(model.tensors["rope_freqs.weight"])
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": longest,
        }
    if "rope_factors_short.weight" in model.tensors and "rope_factors_long.weight" in model.tensors:
        short, long = (_numbers(model.tensors[name]) for name in _FACTORS[1:])
        scaling: dict[str, object] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        scaling |= {} if attention is None else {"attention_factor": attention}
        return scaling | {"original_max_position_embeddings": original}
    if kind in ("linear", "yarn") and factor in (None, 0.0, 1.0):
        return None  # as llama.cpp has it
    if kind == "linear" and factor and factor > 0:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor and factor > 0:
        whole = {} if attention is None else {"attention_factor": attention * (1 + 0.1 * math.log(factor))}
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if (beta := model.optional(f"[ARCH].rope.scaling.{key}", float)) is not None:
                whole[name] = beta
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **whole}
    if kind == "none":
        return None
    raise GgufError(f"rope.scaling.type {kind} is not supported (supported: none, linear, yarn, longrope with factors)")


def _numbers(tensor: GgufTensor) -> list[float]:
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise GgufError("factors of the rotary embedding must be up to 4,096 values of type F32")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        numbers = struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.row_bytes))
    if not all(math.isfinite(number) for number in numbers):
        raise GgufError("factors of the rotary embedding must be finite")
    return list(numbers)


def _llama(model: GgufModel) -> dict[str, object]:
    has_biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {name: tensor in model.tensors for name, tensor in has_biases.items()}


def _mixtral(model: GgufModel) -> dict[str, object]:
    return {
        "num_local_experts": model.value("[ARCH].expert_count", int),
        "num_experts_per_tok": model.value("[ARCH].expert_used_count", int),
    }


def _experts(model: GgufModel) -> dict[str, object]:
    return {
        "num_experts": model.value("[ARCH].expert_count", int),
        "num_experts_per_tok": model.value("[ARCH].expert_used_count", int),
        "moe_intermediate_size": model.value("[ARCH].expert_feed_forward_length", int),
    }


def _qwen2moe(model: GgufModel) -> dict[str, object]:
    size = model.value("[ARCH].expert_shared_feed_forward_length", int)
    return _experts(model) | {"shared_expert_intermediate_size": size, "norm_topk_prob": False}


def _gemma2(model: GgufModel) -> dict[str, object]:
    """The scale of scores is that of the hidden size in the largest Gemma 2 and 3, which the number of layers tells."""
    is_largest = model.value("[ARCH].block_count", int) == {"gemma2": 46}.get(_family(model), 62)
    num_heads, _, head_dim = _heads(model)
    size = model.value("[ARCH].embedding_length", int) // num_heads
    fields: dict[str, object] = {
        "query_pre_attn_scalar": size if is_largest else head_dim,
        "sliding_window": model.optional("[ARCH].attention.sliding_window", int),
        "attn_logit_softcapping": model.optional("[ARCH].attn_logit_softcapping", float),
        "final_logit_softcapping": model.optional("[ARCH].final_logit_softcapping", float),
        "rope_local_base_freq": model.optional("[ARCH].rope.freq_base_swa", float),
    }
    pattern = model.metadata.get(f"{_family(model)}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        fields["layer_types"] = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
    elif isinstance(pattern, int):
        fields["sliding_window_pattern"] = pattern
    return {name: value for name, value in fields.items() if value is not None}  # what is absent has a default


def _phi3(model: GgufModel) -> dict[str, object]:
    return {
        "original_max_position_embeddings": model.optional("[ARCH].rope.scaling.original_context_length", int),
        "sliding_window": model.optional("[ARCH].attention.sliding_window", int) or None,
    }


def _starcoder2(model: GgufModel) -> dict[str, object]:
    return {"use_bias": "blk.0.attn_q.bias" in model.tensors, "sliding_window": None}


def _gpt_oss(model: GgufModel) -> dict[str, object]:
    scaling = _rope_scaling(model)
    return {
        "has_separate_experts": True,
        "intermediate_size": model.value("[ARCH].expert_feed_forward_length", int),
        "num_local_experts": model.value("[ARCH].expert_count", int),
        "num_experts_per_tok": model.value("[ARCH].expert_used_count", int),
        "sliding_window": model.value("[ARCH].attention.sliding_window", int),
        "rope_scaling": scaling and scaling | {"truncate": False},
    }


def _family(model: GgufModel) -> str:
    return model.value("general.architecture", str)


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", _llama, permutes=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", lambda model: {}),
    "qwen2vl": _Architecture("Qwen2ForCausalLM", lambda model: {}),
    "qwen3": _Architecture("Qwen3ForCausalLM", lambda model: {"attention_bias": "blk.0.attn_q.bias" in model.tensors}),
    "qwen2moe": _Architecture("Qwen2MoeForCausalLM", _qwen2moe),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", lambda model: _experts(model) | {"norm_topk_prob": True}),
    "gemma": _Architecture("GemmaForCausalLM", lambda model: {}, norm_offset=1.0),
    "gemma2": _Architecture("Gemma2ForCausalLM", _gemma2, _GEMMA2, norm_offset=1.0),
    "gemma3": _Architecture("Gemma3ForCausalLM", _gemma2, _GEMMA2, norm_offset=1.0),
    "phi3": _Architecture("Phi3ForCausalLM", _phi3, {"ffn_up": "mlp.gate_up_proj"}),
    "starcoder2": _Architecture("Starcoder2ForCausalLM", _starcoder2, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "gpt-oss": _Architecture("GptOssForCausalLM", _gpt_oss, _GPT_OSS),
}
_MIXTURE = _Architecture("MixtralForCausalLM", _mixtral, _MIXTRAL, permutes=True)
