"""Every native family computes what transformers computes, also in the variants that its published checkpoints have."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.architectures import table
from tests.architectures.checkpoints import load_reference, write
from tests.architectures.serving import NATIVE
from tests.architectures.shrink import VOCAB_SIZE
from weft.engine.cache.specs import group_layers
from weft.engine.config import resolve
from weft.engine.describe.config import ModelConfig, load_model_config
from weft.engine.families.attention import AttentionSwitches
from weft.engine.families.registry import identify
from weft.engine.families.switches import SizedFeedForward
from weft.engine.kernels.choice import make_caches
from weft.engine.kernels.cpu import library
from weft.engine.runner.dummy_batch import dummy_batch
from weft.engine.start.model_choice import plan_model
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions

pytestmark = pytest.mark.filterwarnings("default")  # what modules of transformers warn of is no failure here

NUM_TOKENS, BLOCK_SIZE = 48, 16
TOKEN_IDS = (torch.arange(NUM_TOKENS) * 7919 + 5) % VOCAB_SIZE

FAMILIES = [name for name, entry in table.load()["entries"].items() if entry["outcome"] == NATIVE]

Variant = tuple[str, dict[str, Any]]

SHORT_FACTORS = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 1e4}
PUBLISHED: Mapping[str, dict[str, str]] = {
    "ExaoneForCausalLM": {
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    "SarvamMoEForCausalLM": {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias",
    },
}
"""What fields are called in checkpoints under an architecture's own name, which transformers saves under another."""

VARIANTS: list[Variant] = [
    ("arcee", {"attention_bias": True, "mlp_bias": True}),
    ("bloom", {"n_head": 6, "hidden_size": 96}),
    ("cohere", {"use_qk_norm": True}),
    ("ernie4_5", {"use_bias": True}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True}),
    ("falcon", {"multi_query": False, "num_kv_heads": 4, "parallel_attn": False}),
    (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": LOCAL_ROPE,
            }
        },
    ),
    (
        "gemma4_text",
        {
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": 5.0,
            "per_layer_config": {layer: {"head_dim": 32, "num_key_value_heads": 1} for layer in ("1", "3")},
        },
    ),
    (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32},
    ),
    ("gemma4_text", {"use_double_wide_mlp": True, "attention_bias": True, "hidden_size_per_layer_input": 32}),
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("gpt_oss", {"attention_bias": False, "swiglu_limit": 0.3, "swiglu_alpha": 1.0}),
    (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
            "attention_bias": True,
        },
    ),
    (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}},
    ),
    ("hyperclovax", {"use_post_norm": False, "logits_scaling": 0.5, "attention_multiplier": 0.3}),
    ("llama4_text", {"attention_chunk_size": 8, "attention_bias": True, "num_experts_per_tok": 2}),
    ("llama4_text", {"use_qk_norm": False, "attn_temperature_tuning": False, "moe_layers": None}),
    ("ministral3", {"sliding_window": 12}),
    (
        "mpt",
        {
            "n_heads": 6,
            "d_model": 96,
            "attn_config": {"clip_qkv": 0.3, "softmax_scale": 0.2},
        },
    ),
    ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    ("olmo", {"clip_qkv": 0.3}),
    ("opt", {"enable_bias": False}),
    ("persimmon", {"qk_layernorm": False}),
    ("phi3", {"rope_parameters": SHORT_FACTORS, "original_max_position_embeddings": 64}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 12, "layer_types": None}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    ("starcoder2", {"use_bias": False, "sliding_window": 12}),
]
"""What config.json may switch, beside what it has by default."""

ALIBI: list[dict[str, Any]] = [
    {},
    {"multi_query": False, "num_kv_heads": 4, "parallel_attn": False, "bias": True},  # Falcon RW
    {"new_decoder_architecture": True, "num_kv_heads": 2},
    {"num_attention_heads": 6, "hidden_size": 96, "num_kv_heads": 6},
    {"num_attention_heads": 16, "hidden_size": 128, "num_kv_heads": 16, "multi_query": False},
]
"""Falcon's layers with ALiBi."""

MODULES: list[Variant] = [
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("opt", {"do_layer_norm_before": False}),
    ("phi", {"qk_layernorm": True}),
    ("stablelm", {"qk_layernorm": True}),
]
"""What the family cannot compute and transformers' module can."""

SIZES = {
    *("d_model", "n_layers", "n_heads", "max_seq_len"),
    *("vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head"),
    *("intermediate_size", "ffn_dim", "max_position_embeddings", "n_positions", "num_key_value_heads", "num_kv_heads"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "layers_block_type"),
}
"""What every config.json has."""

NEEDED: Mapping[str, dict[str, int]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
}
"""What a configuration must name, for transformers' default is none or cannot be computed with."""


@torch.inference_mode()
def logits(folder: Path, dtype: str) -> torch.Tensor:
    """Of `TOKEN_IDS`: (NUM_TOKENS, vocab_size)."""
    model = load_model_config(folder)
    options = EngineOptions(model=str(folder), device="cpu", dtype=dtype, block_size=BLOCK_SIZE)
    config = resolve(options, model)
    plan = plan_model(model, config)
    assert ("native" in plan.name) is (dtype == "bfloat16")
    decoder = plan.load(folder, lambda done, total: None)
    groups = group_layers(decoder.cache_specs)
    batch = dummy_batch(NUM_TOKENS, [group.spec for group in groups], BLOCK_SIZE, 1)
    caches = make_caches(groups, 1 + NUM_TOKENS // BLOCK_SIZE, config, model.num_heads)
    hidden = decoder.forward(TOKEN_IDS, torch.from_numpy(batch.positions), caches.begin(batch))
    return decoder.compute_logits(hidden).clone()


@torch.inference_mode()
def check(folder: Path, attention: str = "eager", atol: float = 1e-4) -> None:
    """Compare log-probabilities with those of transformers."""
    expected = load_reference(folder, attention)(TOKEN_IDS[None], use_cache=False).logits[0].log_softmax(-1)
    assert expected.std() > 0.1
    found, num_written = logits(folder, "float32"), expected.shape[1]
    torch.testing.assert_close(found[:, :num_written].log_softmax(-1), expected, rtol=1e-5, atol=atol)
    assert (found[:, num_written:] == -1e30).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    check(write(name, tmp_path / name))


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_variants_of_a_family(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    check(write(name, tmp_path / name, changes))


@pytest.mark.parametrize("changes", ALIBI)
def test_falcon_with_alibi(tmp_path: Path, changes: dict[str, Any]) -> None:
    """It ran request by request by transformers' eager attention, which adds ALiBi twice; `sdpa` is its default.

    Transformers rounds slope times position to bfloat16, which changes nothing where slopes are powers of 2.
    """
    atol = 0.05 if changes.get("num_attention_heads") == 16 else 1e-4
    check(write("falcon", tmp_path / "falcon", {"alibi": True, **changes}), "sdpa", atol)


@pytest.mark.parametrize(
    "name",
    [
        *("cohere2", "exaone4", "gemma3_text", "glm", "gpt2", "gpt_neox", "gpt_oss", "hunyuan_v1_dense"),
        *("gemma4_text", "llama4_text", "ministral3"),
    ],
)
@pytest.mark.skipif(library.load() is None, reason="no native kernels")
def test_native_kernels_compute_the_same_in_bfloat16(tmp_path: Path, name: str) -> None:
    """Their heads are as wide as the kernels ask for, which those of other tests are not."""
    sizes = {"n_embd": 128} if name == "gpt2" else {"hidden_size": 128}
    fields = CONFIG_MAPPING[name]().to_dict()
    heads = {"head_dim": 32} if "head_dim" in fields else {}
    experts = {"num_experts_per_tok": 8} if "num_local_experts" in fields else {}  # all, so that no rounding chooses
    folder = write(name, tmp_path / name, {**sizes, **heads, **experts})
    exact = logits(folder, "float32")
    errors = (logits(folder, "bfloat16") - exact) / exact.std(-1, keepdim=True)
    assert errors.square().mean().sqrt() < 0.05


@pytest.mark.parametrize(("name", "changes"), MODULES)
def test_what_a_family_lacks_is_left_to_the_module(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    folder = write_config(tmp_path, name, CONFIG_MAPPING[name](**changes).to_dict())
    assert identify(folder).switches is None
    with pytest.raises(ModelError, match=r"not supported"):
        identify(folder, "native")


def test_a_stored_head_counts_whatever_is_tied(tmp_path: Path) -> None:
    folder = write("cohere", tmp_path / "cohere")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"]
    got = logits(folder, "float32")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(got, logits(folder, "float32").roll(1, 1))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_may_be_fused(tmp_path: Path, is_transposed: bool) -> None:
    folder = write("qwen3_moe", tmp_path / "qwen3_moe", {"hidden_size": 128})
    apart = logits(folder, "float32")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}.{index}.{part}_proj.weight") for index in range(8)])
            for part in ("gate", "up", "down")
        }
        gate_up = torch.cat((parts["gate"], parts["up"]), 1)
        for name, tensor in (("gate_up_proj", gate_up), ("down_proj", parts["down"])):
            tensors[f"{prefix}.{name}"] = (tensor.transpose(1, 2) if is_transposed else tensor).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(logits(folder, "float32"), apart)


def as_published(folder: Path, name: str, changes: Mapping[str, Any], without: str = "") -> ModelConfig:
    fields = {**CONFIG_MAPPING[name]().to_dict(), **changes}
    return load_model_config(write_config(folder, name, {k: v for k, v in fields.items() if k != without}))


@pytest.mark.parametrize(
    ("name", "architecture"), [("exaone", "ExaoneForCausalLM"), ("sarvam_moe", "SarvamMoEForCausalLM")]
)
def test_checkpoints_may_have_the_names_of_their_makers(tmp_path: Path, name: str, architecture: str) -> None:
    folder = write(name, tmp_path / name, {"attention_bias": True})
    expected = logits(folder, "float32")
    path = folder / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    own = {PUBLISHED[architecture].get(field, field): value for field, value in fields.items()}
    path.write_text(json.dumps(own | {"architectures": [architecture], "model_type": name}), encoding="utf-8")
    torch.testing.assert_close(logits(folder, "float32"), expected, rtol=0, atol=0)


def test_lfm2_may_name_its_size_as_its_makers_do(tmp_path: Path) -> None:
    """LFM2-1.2B has no intermediate_size, and was refused."""
    config = as_published(tmp_path, "lfm2", {"block_ff_dim": 12_288}, without="intermediate_size")
    assert config.switches.feed_forwards[0] == SizedFeedForward(8192)


@pytest.mark.parametrize(("value", "is_tuned"), [(4, True), (True, True), (None, True), (0, False), (False, False)])
def test_the_first_files_of_llama_4_have_a_number_for_a_flag(tmp_path: Path, value: object, is_tuned: bool) -> None:
    config = as_published(tmp_path, "llama4_text", {"attn_temperature_tuning": value})
    assert any(isinstance(mixer, AttentionSwitches) and mixer.is_tuned for mixer in config.switches.mixers) == is_tuned


def test_all_that_gemma_4_keeps_of_a_token_counts_in_memory(tmp_path: Path) -> None:
    """E2B's layers are twice as wide where they share keys and values, and each has an input of its own."""
    layers = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "intermediate_size": 6144}
    config = as_published(tmp_path, "gemma4_text", layers | {"num_hidden_layers": 12, "layer_types": None})
    assert (config.feed_forward_values, config.kept_values) == (2 * 6144, 12 * 256)
    assert config.position_values == 2 * (256 + 512)


def test_layers_without_rotary_embedding_need_no_table(tmp_path: Path) -> None:
    assert as_published(tmp_path, "llama4_text", {}).position_values == 2 * 128


def write_config(folder: Path, name: str, fields: Mapping[str, Any]) -> Path:
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    text = json.dumps({**fields, "architectures": [architecture], "model_type": name}, default=str)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_left_out_is_what_transformers_takes_for_granted(tmp_path: Path, name: str) -> None:
    needed = NEEDED.get(name, {})
    whole = CONFIG_MAPPING[name]().to_dict() | needed
    if "text_config" in whole:
        pytest.skip("its text half has a model type of its own")
    named = load_model_config(write_config(tmp_path, name, whole))
    short = {key: value for key, value in whole.items() if key in SIZES} | needed
    left_out = load_model_config(write_config(tmp_path, name, short))
    ignored = {name: getattr(named, name) for name in ("dtype", "eos_token_ids", "num_draft_layers")}
    assert dataclasses.replace(left_out, **ignored) == named
