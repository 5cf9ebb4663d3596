"""Writes tiny GGUF files with the `gguf` package, each beside a plain checkpoint of the weights that it stands for.

Tensors are named and changed as llama.cpp's converter does it. Types that `gguf` cannot quantize to get random blocks.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from tests.checkpoints import Checkpoint, write_checkpoint
from tests.tokenizers_for_tests import byte_level

Array = npt.NDArray[np.float32]
Octets = npt.NDArray[np.uint8]
Kinds = Callable[[str], Kind]
"""Name of a matrix in the file -> its type."""

_HALVES = {  # where blocks of random bytes must have numbers that are finite and small
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def random_blocks(kind: Kind, shape: tuple[int, ...], seed: int = 0) -> Octets:
    """Any bytes are blocks of these types, but for the numbers in half precision."""
    generator = np.random.default_rng(seed)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), np.uint8)
    for place in _HALVES.get(kind, ()):
        halves = (generator.random((*blocks.shape[:-1], 1)) * 1e-3 - 5e-4).astype(np.float16)
        blocks[..., place : place + 2] = halves.view(np.uint8)
    if kind == Kind.MXFP4:
        blocks[..., 0] = 120 + blocks[..., 0] % 4
    return blocks.reshape(*shape[:-1], -1)


def stored(values: Array, kind: Kind, seed: int) -> tuple[npt.NDArray[np.generic], Array]:
    """What is in the file, and the values that it stands for."""
    if kind in _HALVES:
        data: npt.NDArray[np.generic] = random_blocks(kind, values.shape, seed)
    else:
        data = gguf.quantize(values, kind)
    return data, gguf.dequantize(data, kind).reshape(values.shape)


def write(
    base: Path,
    folder: Path,
    architecture: str,
    kinds: Kinds,
    chat_template: str = "",
    tokenizer: dict[str, dict[str, object]] | None = None,
    **changes: object,
) -> tuple[Path, Path]:
    """A file of a checkpoint, and the folder of a plain checkpoint; changes are of the metadata.

    Args:
        tokenizer: A byte-level tokenizer.json; None for a small one.
    """
    config = json.loads((base / "config.json").read_text())
    file, plain = folder / "model.gguf", folder / "plain"
    shutil.copytree(base, plain)
    writer = gguf.GGUFWriter(file, architecture)
    add_metadata(writer, architecture, config, changes)
    add_tokenizer(writer, tokenizer or json.loads(byte_level(vocab_size=config["vocab_size"] - 2).to_str()))
    if chat_template:
        writer.add_chat_template(chat_template)
    tensors: dict[str, torch.Tensor] = {}
    for seed, (name, values, put_back) in enumerate(_converted(base, architecture, config)):
        is_matrix = values.ndim > 1 and "ffn_gate_inp" not in name and name.endswith(".weight")
        kind = kinds(name) if is_matrix else Kind.F32
        data, meant = stored(values, kind, seed)
        writer.add_tensor(name, data, raw_dtype=kind)
        tensors |= put_back(torch.from_numpy(meant.copy()))
    rope = config["rope_parameters"]
    factors = {"rope_freqs": _llama3(rope, config["head_dim"])} if rope.get("rope_type") == "llama3" else {}
    if rope.get("rope_type") == "longrope":
        factors = {f"rope_factors_{kind}": rope[f"{kind}_factor"] for kind in ("short", "long")}
    for name, numbers in factors.items():
        writer.add_tensor(f"{name}.weight", np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, plain / "model.safetensors")
    return file, plain


def _llama3(rope: Mapping[str, float], head_dim: int) -> list[float]:
    """What divides each frequency."""
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for index in range(0, head_dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        smooth = min(1.0, max(0.0, (original / length - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


PutBack = Callable[[torch.Tensor], dict[str, torch.Tensor]]


def _converted(base: Path, architecture: str, config: dict[str, object]) -> Iterator[tuple[str, Array, PutBack]]:
    """Names and values in the file, and how they are made those of the checkpoint again."""
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config["num_hidden_layers"]
    )
    experts: dict[str, dict[int, torch.Tensor]] = {}
    tensors = load_file(base / "model.safetensors")
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    for name, tensor in tensors.items():
        if "gate_up_proj" in name and architecture == "gpt-oss":
            values = tensor if name.endswith("_bias") else tensor.transpose(1, 2)
            for index, half in enumerate(("gate", "up")):
                whole = name.replace("gate_up_proj", f"{half}_proj").replace("_bias", ".bias")
                whole = whole if whole.endswith(".bias") else f"{whole}.weight"
                yield names.get_name(whole, (".weight", ".bias")), values[:, index::2].numpy(), _half(name, index)
        elif found := _EXPERT.search(name):
            experts.setdefault(_EXPERT.sub(".experts.", name), {})[int(found[1])] = tensor
        else:
            yield _one(names, architecture, config, name, tensor)
    for name, by_index in experts.items():
        stack = torch.stack([by_index[index] for index in range(len(by_index))]).numpy()
        yield names.get_name(name, (".weight",)), stack, _unstack(name)


_FUSED: dict[str, dict[int, torch.Tensor]] = {}


def _half(name: str, index: int) -> PutBack:
    def put_back(values: torch.Tensor) -> dict[str, torch.Tensor]:
        halves = _FUSED.setdefault(name, {})
        halves[index] = values
        if len(halves) < 2:
            return {}
        del _FUSED[name]
        whole = torch.stack((halves[0], halves[1]), 2).flatten(1, 2)
        return {name: whole if name.endswith("_bias") else whole.transpose(1, 2)}

    return put_back


def _unstack(name: str) -> PutBack:
    return lambda stack: {name.replace(".experts.", f".experts.{i}."): part for i, part in enumerate(stack.unbind())}


def _one(
    names: gguf.TensorNameMap, architecture: str, config: Mapping[str, object], name: str, tensor: torch.Tensor
) -> tuple[str, Array, PutBack]:
    whole = name.replace("_bias", ".bias") if "experts" in name else name
    whole = whole if whole.endswith((".weight", ".bias")) else f"{whole}.weight"
    in_file = names.get_name(whole, (".weight", ".bias"))
    assert in_file, name
    if architecture == "llama" and re.search(r"self_attn\.[qk]_proj", name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        assert isinstance(heads, int)
        outer = tensor.shape[1:]
        there = tensor.reshape(heads, 2, -1, *outer).swapaxes(1, 2).reshape(tensor.shape)
        return (
            in_file,
            there.numpy(),
            lambda values: {name: values.reshape(heads, -1, 2, *outer).swapaxes(1, 2).reshape(tensor.shape)},
        )
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return in_file, (tensor + 1).numpy(), lambda values: {name: values - 1}
    if "experts" in name and tensor.dim() == 3:
        return in_file, tensor.transpose(1, 2).contiguous().numpy(), lambda values: {name: values.transpose(1, 2)}
    if name.endswith("shared_expert_gate.weight"):
        return in_file, tensor[0].numpy(), lambda values: {name: values[None]}
    return in_file, tensor.numpy(), lambda values: {name: values}


def add_metadata(
    writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, object], changes: Mapping[str, object]
) -> None:
    rope = config.get("rope_parameters")
    assert isinstance(rope, dict)
    rope = rope.get("full_attention", rope)
    values: dict[str, object] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": config.get("norm_epsilon"),
        "expert_count": config.get("num_experts", config.get("num_local_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "attention.sliding_window": config.get("sliding_window"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        **changes,
    }
    for key, value in values.items():
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, dict[str, object]], pre: str = "qwen2") -> None:
    """A byte-level one, as the converter writes it."""
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    vocab, merges = model["vocab"], model["merges"]
    assert isinstance(vocab, dict) and isinstance(merges, list) and isinstance(added, list)
    ids = vocab | {token["content"]: token["id"] for token in added}
    types = dict.fromkeys(ids, gguf.TokenType.NORMAL)
    for token in added:
        types[token["content"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([types[token] for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    if "<unk>" in ids:
        writer.add_unk_token_id(ids["<unk>"])


def write_model(
    folder: Path, architecture: str, checkpoint: Checkpoint, kinds: Kinds, **changes: Any
) -> tuple[Path, Path]:
    """`write` of a tiny random checkpoint."""
    folder.mkdir(exist_ok=True, parents=True)
    write_checkpoint(checkpoint, folder / "base")
    return write(folder / "base", folder, architecture, kinds, **changes)
