import json
import math
from pathlib import Path

import pytest
import torch

from weft.engine.describe.config import ModelConfig, load_model_config
from weft.engine.describe.specs import AttentionSpec, DenseSpec, PreNormSpec
from weft.engine.families.switches import Norms, QKNorm
from weft.engine.layers.rotary import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from weft.engine.parts.decoder import decoder_spec
from weft.engine.weights.quantization import Scheme
from weft.engine.wire.errors import ModelError

SIZES: dict[str, object] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LLAMA: dict[str, object] = SIZES | {"architectures": ["LlamaForCausalLM"]}
MISTRAL: dict[str, object] = SIZES | {"architectures": ["MistralForCausalLM"]}
QWEN2: dict[str, object] = SIZES | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3: dict[str, object] = SIZES | {"architectures": ["Qwen3ForCausalLM"]}
GEMMA: dict[str, object] = SIZES | {"architectures": ["GemmaForCausalLM"]}
GEMMA2: dict[str, object] = SIZES | {"architectures": ["Gemma2ForCausalLM"]}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def write(folder: Path, values: dict[str, object], name: str = "config.json") -> Path:
    (folder / name).write_text(json.dumps(values))
    return folder


def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
    """Whether the first block's projections have biases: queries, keys and values; output; feed-forward layer."""
    block = decoder_spec(config).blocks[0]
    assert isinstance(block, PreNormSpec) and isinstance(block.mixer, AttentionSpec)
    assert isinstance(block.feed_forward, DenseSpec)
    return block.mixer.qkv.has_bias, block.mixer.output.matrix.has_bias, block.feed_forward.first.has_bias


def test_llama_2_as_published(tmp_path: Path) -> None:
    values = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    config = load_model_config(write(tmp_path, values | {"torch_dtype": "float16", "eos_token_id": 2}))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 8, 8)
    assert config.ropes[0] == RopeConfig(10_000.0)
    assert config.dtype == torch.float16
    assert config.eos_token_ids == (2,)
    assert config.sliding_windows == (None,) * 4
    assert biases(config) == (False, False, False)
    assert config.switches.qk_norm is None
    assert (config.activation, config.tie_word_embeddings) == ("silu", False)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (4096, 1e-5)


@pytest.mark.parametrize(
    "dialect",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING, "torch_dtype": "bfloat16"},
        {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 500000.0}, "dtype": "bfloat16"},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_llama_3_in_both_dialects(tmp_path: Path, dialect: dict[str, object]) -> None:
    write(tmp_path, {"eos_token_id": [128001, 128008, 128009]}, "generation_config.json")
    config = load_model_config(write(tmp_path, LLAMA | dialect | {"vocab_size": 128256, "eos_token_id": 128001}))
    assert config.ropes[0] == RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == (128001, 128008, 128009)


def test_other_rope_scalings(tmp_path: Path) -> None:
    linear = load_model_config(write(tmp_path, LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}}))
    assert linear.ropes[0] == RopeConfig(10_000.0, LinearScaling(2.0))
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    yarn = load_model_config(write(tmp_path, QWEN2 | {"rope_theta": 1e6, "rope_scaling": scaling}))
    assert yarn.ropes[0] == RopeConfig(1e6, YarnScaling(4.0, 4096, 0.1 * math.log(4.0) + 1.0))
    # The recipe in Qwen2.5's model card leaves max_position_embeddings as it was.
    assert yarn.max_position_embeddings == 16384


@pytest.mark.parametrize(
    ("changes", "attention_factor"),
    [
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.2772588 / 1.1386294),
        ({"mscale": 2.0}, 1.1386294),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_attention_factor_of_yarn(tmp_path: Path, changes: dict[str, object], attention_factor: float) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0} | changes
    config = load_model_config(write(tmp_path, LLAMA | {"rope_scaling": scaling}))
    assert config.ropes[0].scaling is not None
    assert config.ropes[0].scaling.attention_factor == pytest.approx(attention_factor)


def test_biases_of_llama(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True}))
    assert biases(config) == (True, True, True)


@pytest.mark.parametrize(
    ("changes", "window"), [({"sliding_window": 128}, 128), ({"sliding_window": None}, None), ({}, 4096)]
)
def test_window_of_mistral(tmp_path: Path, changes: dict[str, object], window: int | None) -> None:
    config = load_model_config(write(tmp_path, MISTRAL | changes | {"head_dim": None}))
    assert config.sliding_windows == (window,) * 4
    assert config.head_dim == 8


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 9, "use_sliding_window": False, "max_window_layers": 1}, (None,) * 4),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (None, 9, 9, 9)),
        (
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            },
            (9, None, None, 9),
        ),
    ],
)
@pytest.mark.parametrize("family", [QWEN2, QWEN3])
def test_windows_of_qwen(
    tmp_path: Path, family: dict[str, object], changes: dict[str, object], windows: tuple[int | None, ...]
) -> None:
    assert load_model_config(write(tmp_path, family | changes)).sliding_windows == windows


def test_switches_of_qwen(tmp_path: Path) -> None:
    qwen2 = load_model_config(write(tmp_path, QWEN2))
    assert biases(qwen2) == (True, False, False)
    assert (qwen2.switches.qk_norm, qwen2.head_dim) == (None, 8)
    qwen3 = load_model_config(write(tmp_path, QWEN3 | {"tie_word_embeddings": True}))
    assert biases(qwen3) == (False, False, False)
    assert (qwen3.switches.qk_norm, qwen3.head_dim) == (QKNorm(), 128)
    assert qwen3.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, "gelu_pytorch_tanh"),
        ({"hidden_act": "gelu"}, "gelu_pytorch_tanh"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ({"hidden_act": "silu"}, "silu"),
    ],
)
def test_gemma_as_published(tmp_path: Path, changes: dict[str, object], activation: str) -> None:
    config = load_model_config(write(tmp_path, GEMMA | changes))
    assert (config.activation, config.head_dim, config.tie_word_embeddings) == (activation, 256, True)
    assert (config.switches.norm_offset, config.switches.norms, config.switches.embedding_scale) == (
        1.0,
        Norms.BEFORE,
        8.0,
    )
    assert (config.switches.attention_scale, config.switches.attention_soft_cap, config.switches.logit_soft_cap) == (
        None,
        None,
        None,
    )
    assert config.sliding_windows == (None,) * 4


def test_gemma_2_as_published(tmp_path: Path) -> None:
    """What is left out is what transformers takes for granted."""
    config = load_model_config(write(tmp_path, GEMMA2))
    assert (config.activation, config.head_dim, config.tie_word_embeddings) == ("gelu_pytorch_tanh", 256, True)
    assert (config.switches.norm_offset, config.switches.norms, config.switches.embedding_scale) == (
        1.0,
        Norms.AROUND,
        8.0,
    )
    assert (config.switches.attention_scale, config.switches.attention_soft_cap, config.switches.logit_soft_cap) == (
        0.0625,
        50.0,
        30.0,
    )
    assert config.sliding_windows == (4096, None, 4096, None)
    values = {"query_pre_attn_scalar": 144, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10}
    given = load_model_config(write(tmp_path, GEMMA2 | values | {"tie_word_embeddings": False}))
    assert (given.switches.attention_scale, given.switches.attention_soft_cap, given.switches.logit_soft_cap) == (
        1 / 12,
        20.0,
        10.0,
    )
    assert not given.tie_word_embeddings


def test_caps_and_windows_of_gemma_2_may_be_null(tmp_path: Path) -> None:
    values = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"))
    config = load_model_config(write(tmp_path, GEMMA2 | values))
    assert (config.switches.attention_soft_cap, config.switches.logit_soft_cap) == (None, None)
    assert config.sliding_windows == (None,) * 4


def test_layer_types_of_gemma_2(tmp_path: Path) -> None:
    layer_types = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    config = load_model_config(write(tmp_path, GEMMA2 | {"sliding_window": 7, "layer_types": layer_types}))
    assert config.sliding_windows == (None, None, 7, None)


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"hidden_activation": "silu", "hidden_act": "gelu"}, "silu"),
        ({"hidden_activation": None, "hidden_act": "gelu"}, "gelu"),
    ],
)
def test_activation_of_gemma_2(tmp_path: Path, changes: dict[str, object], activation: str) -> None:
    assert load_model_config(write(tmp_path, GEMMA2 | changes)).activation == activation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "tanh"}, "activation tanh is not supported"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be between 1e-06 and 1000000000000, got 0"),
        (
            {"attn_logit_softcapping": -50.0},
            r"attn_logit_softcapping must be between 1e-06 and 1000000000000, got -50\.0",
        ),
        ({"final_logit_softcapping": "30"}, 'final_logit_softcapping must be a number, got "30"'),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 4"),
        ({"sliding_window": "4096"}, "sliding_window must be an integer"),
    ],
)
def test_refusals_of_gemma_2(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model_config(write(tmp_path, GEMMA2 | changes))


def test_an_end_of_sequence_outside_the_vocabulary_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With min_tokens it was banned by an index behind the logits, which ended all requests of the step."""
    write(tmp_path, {"eos_token_id": [2, 128009, -1]}, "generation_config.json")
    config = load_model_config(write(tmp_path, LLAMA | {"vocab_size": 32000}))
    assert config.eos_token_ids == (2,)
    assert caplog.messages == ["eos_token_id: 128009, -1 left out, for token ids go from 0 to 31999"]


def test_no_eos_and_no_dtype(tmp_path: Path) -> None:
    write(tmp_path, {"temperature": 0.6}, "generation_config.json")
    config = load_model_config(write(tmp_path, LLAMA))
    assert config.eos_token_ids == ()
    assert config.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel is not supported natively .*weft models"),
        ({"architectures": None}, "names no architecture"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"short_factor must be a list of 4 numbers, got null"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0]}},
            r"long_factor must be a list of 4 numbers, got \[2.0\]",
        ),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope type spiral is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: no factor"),
        ({"partial_rotary_factor": 0.2}, "rotary embedding of 1 values in heads of 8"),
        ({"hidden_act": "tanh"}, "activation tanh is not supported .*silu"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size must be two"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn is not supported"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_size": "64"}, 'hidden_size must be an integer, got "64"'),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": 1}, "hidden_act must be a string"),
        ({"eos_token_id": "2"}, "eos_token_id must be an integer or a list of integers"),
        ({"rope_scaling": 2.0}, "rope_scaling must be an object"),
        ({"num_key_value_heads": 3}, "8 heads of 8 values over 3 key-value heads"),
    ],
)
def test_refusals_name_the_fault(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        load_model_config(write(tmp_path, LLAMA | changes))
    assert "\n" not in str(raised.value)


FOUR_BITS = {"num_bits": 4, "strategy": "group", "group_size": 128}


def torchao(kind: str, version: int = 2, **data: str) -> dict[str, object]:
    values = {name: {"_data": value} for name, value in data.items()}
    return {"quant_type": {"default": {"_type": kind, "_version": version, "_data": values}}}


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("hqq", {}, r"quant_method hqq \(supported: auto-round, awq, .*\)\. Convert the checkpoint, or take"),
        ("modelopt", {"quant_algo": "W4A8_AWQ"}, r"quant_algo W4A8_AWQ of modelopt \(supported: FP8, FP8_PER"),
        ("torchao", {"quant_type": {"default": {"_type": "FqnToConfig"}}}, "quant_type FqnToConfig of torchao"),
        ("torchao", torchao("Int8WeightOnlyConfig", 1), r"_version 1 of Int8WeightOnlyConfig \(supported: 2\)"),
        ("torchao", torchao("Int4WeightOnlyConfig", int4_packing_format="PRESHUFFLED"), "format PRESHUFFLED of Int4W"),
        ("torchao", torchao("Float8WeightOnlyConfig", weight_dtype="float8_e5m2"), "weight_dtype float8_e5m2 of Fl"),
        ("gptq", {"bits": 3}, r"bits 3 \(supported: 2, 4, 8\)"),
        ("gptq", {"bits": 4, "group_size": 0}, "group_size must be a positive integer, or -1, got 0"),
        ("gptq", {"bits": 4, "checkpoint_format": "marlin"}, r"checkpoint_format marlin \(supported: gptq, gptq_v2\)"),
        ("gptq", {"bits": 4, "dynamic": {"+:(": {"bits": 8}}}, "dynamic must be made of regular expressions"),
        ("awq", {"version": "gemv"}, r"version gemv of awq \(supported: gemm\)"),
        (
            "auto-round",
            {"bits": 4, "packing_format": "auto_round:exllamav2"},
            "packing_format exllamav2, data_type",
        ),
        ("compressed-tensors", {"format": "marlin-24", "config_groups": {"a": {}}}, "format marlin-24 of compressed-t"),
        ("compressed-tensors", {"transform_config": {"config_groups": {"R1": {}}}}, "a transform_config"),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with format sparse-24-bitmask"),
        ("compressed-tensors", {"config_groups": {}}, "no config_groups with weights"),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"weights": FOUR_BITS | {"num_bits": 3}}}},
            "num_bits 3 of",
        ),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"weights": FOUR_BITS | {"type": "nf"}}}},
            "num_bits 4 of type nf",
        ),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"weights": FOUR_BITS | {"group_size": -1}}}},
            "group_size must",
        ),
    ],
)
def test_forms_of_quantized_weights_that_are_not_read_are_refused(
    tmp_path: Path, method: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model_config(write(tmp_path, LLAMA | {"quantization_config": {"quant_method": method, **changes}}))


def test_some_layers_may_be_quantized_otherwise(tmp_path: Path) -> None:
    """By GPTQModel's rules and by AutoRound's names and patterns."""
    rules = {"bits": 4, "dynamic": {"-:.*k_proj": {}, "+:.*down": {"bits": 8, "group_size": 32}}}
    names = {"bits": 4, "extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32}}}
    patterns = {"bits": 4, "extra_config": {r"layers\.\d+\.mlp\.down": {"bits": 8, "group_size": 32}}}
    methods = {"gptq": [rules], "auto-round": [names, patterns]}
    for config in [{"quant_method": method, **config} for method, given in methods.items() for config in given]:
        found = load_model_config(write(tmp_path, LLAMA | {"quantization_config": config})).quantization
        assert found is not None
        assert found.scheme("model.layers.0.mlp.down_proj") == Scheme(8, 32)
        assert found.scheme("model.layers.0.mlp.up_proj") == Scheme(4, 128)


def test_a_class_of_modules_that_is_ignored_ignores_no_matrix(tmp_path: Path) -> None:
    """All matrices counted as plain then, in the plan of memory."""
    groups = {"a": {"weights": FOUR_BITS, "targets": ["Linear"]}}
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["LlamaRMSNorm", "lm_head"]}
    found = load_model_config(write(tmp_path, LLAMA | {"quantization_config": config})).quantization
    assert found is not None and found.expected("model.layers.0.mlp.up_proj") == Scheme(4, 128)
    assert found.expected("lm_head") is None


def test_torchao_says_whether_groups_have_zero_points(tmp_path: Path) -> None:
    """The plan counts them, and kernels take what the plan says."""
    per_group = {"weight_granularity": {"_data": {"group_size": 64}}, "weight_dtype": {"_data": "int4"}}
    mappings = {name: {"_data": name} for name in ("SYMMETRIC", "ASYMMETRIC")}
    for data, expected in (
        ({**per_group, "weight_mapping_type": mappings["SYMMETRIC"]}, Scheme(4, 64, activation_bits=8)),
        ({**per_group, "weight_mapping_type": mappings["ASYMMETRIC"]}, Scheme(4, 64, None, False, 8, True)),
        ({}, Scheme(8, 32, activation_bits=8)),
    ):
        default = {"_type": "Int8DynamicActivationIntxWeightConfig", "_version": 2, "_data": data}
        config = {"quant_method": "torchao", "quant_type": {"default": default}}
        found = load_model_config(write(tmp_path, LLAMA | {"quantization_config": config})).quantization
        assert found is not None and found.scheme("model.layers.0.mlp.up_proj") == expected


def test_files_of_modelopt_say_what_config_does_not(tmp_path: Path) -> None:
    own = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.0.*"]}
    write(tmp_path, {"producer": {"name": "modelopt"}, "quantization": own}, "hf_quant_config.json")
    found = load_model_config(write(tmp_path, LLAMA)).quantization
    assert found is not None and str(found) == "W4A4 in floating point (ModelOpt NVFP4; activations are not quantized)"
    assert found.has_kv_scales
    assert found.expected("lm_head") is None and found.expected("model.layers.0.mlp.up_proj") is None
    assert found.expected("model.layers.1.mlp.up_proj") == found.scheme("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("layer_types", "message"),
    [
        (["chunked_attention"] * 4, "layer type chunked_attention is not supported"),
        (["full_attention"] * 3, "layer_types must be a list of 4"),
    ],
)
def test_refused_layer_types(tmp_path: Path, layer_types: list[str], message: str) -> None:
    values = QWEN3 | {"use_sliding_window": True, "sliding_window": 8, "layer_types": layer_types}
    with pytest.raises(ModelError, match=message):
        load_model_config(write(tmp_path, values))


def test_folders_without_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_model_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not readable as JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected a JSON object"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, r"config\.json: num_attention_heads must be between 1 and 65536, got 0"),
        ({"vocab_size": -1}, "vocab_size must be between 1 and 16777216, got -1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be between 1 and 512, got 0"),
        ({"intermediate_size": -5}, "intermediate_size must be between 0 and 16777216, got -5"),
    ],
)
def test_sizes_are_positive(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 9,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ModelError, match=message):
        load_model_config(tmp_path)
