"""Families with DeepSeek V3's router, whose experts have Qwen's names: GLM 4.5, Sarvam, dots.1, EXAONE and others."""

from collections.abc import Callable
from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.layers.routing import TopK
from weft.engine.models.families import hunyuan
from weft.engine.models.families.experts import ExpertNames, ExpertSwitches, corrected, on_layers
from weft.engine.models.families.family import FamilySwitches, QKNorm, family
from weft.engine.models.families.names import LLAMA
from weft.engine.models.families.windows import read_window, windows_by_pattern, windows_where

_SARVAM = replace(
    LLAMA,
    embedding="model.word_embeddings",
    qkv=("attention.query_key_value",),
    query_norm="attention.query_layernorm",
    key_norm="attention.key_layernorm",
    output="attention.dense",
)


@family("Glm4MoeForCausalLM")
def glm4_moe(fields: Fields) -> FamilySwitches:
    """Half of a head is rotated; the first layers are dense."""
    if fields.optional_text("model_type") == "sarvam_moe":
        return sarvam_moe(fields)
    first = fields.integer("first_k_dense_replace", 1)
    return FamilySwitches(
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "num_key_value_heads": 8},
        qkv_bias=fields.flag("attention_bias", False),
        o_bias=False,
        qk_norm=QKNorm() if fields.flag("use_qk_norm", False) else None,
        feed_forwards=on_layers(fields, corrected(fields, 128), lambda layer: layer >= first),
    )


@family("SarvamMoEForCausalLM")
def sarvam_moe(fields: Fields) -> FamilySwitches:
    """GLM 4.5 with stacked projections and names of its own. What transformers saves has GLM's architecture."""
    fields = fields.with_aliases({"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"})
    experts = replace(corrected(fields, 128, scale=2.5), names=ExpertNames(correction="mlp.gate.expert_bias"))
    first = fields.integer("first_k_dense_replace", 1)
    return FamilySwitches(
        names=_SARVAM,
        defaults={"num_key_value_heads": 4, "rope_theta": 8e6},
        qkv_bias=fields.flag("use_qkv_bias", False) or fields.flag("attention_bias", False),
        o_bias=False,
        qk_norm=QKNorm() if fields.flag("use_qk_norm", True) else None,
        head_dim=64,
        feed_forwards=on_layers(fields, experts, lambda layer: layer >= first),
    )


@family("Dots1ForCausalLM")
def dots1(fields: Fields) -> FamilySwitches:
    """QK-norm, and windows in upper layers or by layer_types."""
    bias, first = fields.flag("attention_bias", False), fields.integer("first_k_dense_replace", 0)
    first_window = fields.integer("max_window_layers", 62)
    experts = corrected(fields, fields.integer("n_routed_experts"), divides=False)
    return FamilySwitches(
        qkv_bias=bias,
        qk_norm=QKNorm(),
        sliding_windows=windows_where(fields, read_window(fields, 4096), lambda layer: layer >= first_window),
        feed_forwards=on_layers(fields, experts, lambda layer: layer >= first),
    )


@family("SolarOpenForCausalLM")
def solar_open(fields: Fields) -> FamilySwitches:
    """Llama's attention; all layers have experts, so config.json has no size of dense ones."""
    return FamilySwitches(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "intermediate_size": 0},
        qkv_bias=fields.flag("attention_bias", False),
        o_bias=False,
        head_dim=128,
        feed_forwards=on_layers(fields, corrected(fields, 128)),
    )


@family("Ernie4_5_MoeForCausalLM")
def ernie4_5_moe(fields: Fields) -> FamilySwitches:
    """Softmax scores with a correction bias; neighbours are rotated together."""
    bias, num_layers = fields.flag("use_bias", False), fields.integer("num_hidden_layers")
    first, last = fields.integer("moe_layer_start_index", 1), fields.integer("moe_layer_end_index", -1)
    step, size = fields.integer("moe_layer_interval", 1), fields.integer("moe_intermediate_size", 1536)
    experts = ExpertSwitches(
        num_experts=fields.integer("moe_num_experts", fields.integer("num_experts", 64)),
        size=size,
        routing=TopK(
            fields.integer("moe_k", fields.integer("num_experts_per_tok", 6)),
            divides=True,
            epsilon=fields.number("moe_norm_min", 1e-12),
        ),
        names=ExpertNames(correction="mlp.moe_statics.e_score_correction_bias"),
        has_correction_row=True,
        shared_size=size * fields.integer("moe_num_shared_experts", 2),
        shared_bias=bias,
    )
    is_sparse = range(first, num_layers if last == -1 else last + 1)
    return FamilySwitches(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_key_value_heads": 4},
        qkv_bias=bias,
        mlp_bias=bias,
        is_interleaved=True,
        ties_embeddings=True,
        feed_forwards=on_layers(fields, experts, lambda layer: layer in is_sparse and (layer + 1) % step == 0),
    )


@family("HYV3ForCausalLM")
def hy_v3(fields: Fields) -> FamilySwitches:
    """QK-norm; which layers have experts, mlp_layer_types says."""
    names = replace(hunyuan.EXPERTS, router="mlp.router.gate", correction="mlp.expert_bias")
    experts = replace(_with_own_names(fields, 192, 1536), names=names)
    routing = TopK(
        fields.integer("num_experts_per_tok", 8),
        scores="sigmoid",
        divides=True,
        scale=fields.number("router_scaling_factor", 2.826),
    )
    return FamilySwitches(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0, "num_key_value_heads": 8},
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=QKNorm(),
        head_dim=128,
        feed_forwards=on_layers(fields, replace(experts, routing=routing), _sparse(fields, 1)),
    )


@family("ExaoneMoeForCausalLM")
def exaone_moe(fields: Fields) -> FamilySwitches:
    """Layers without a window have no rotary embedding."""
    window, num_layers = read_window(fields, 4096), fields.integer("num_hidden_layers")
    windows = windows_by_pattern(fields, window, 4) if window else (None,) * num_layers
    experts = replace(_with_own_names(fields, 64, 1024), names=ExpertNames(correction="mlp.e_score_correction_bias"))
    first = fields.integer("first_k_dense_replace", 1)
    return FamilySwitches(
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32},
        qk_norm=QKNorm(),
        sliding_windows=windows,
        ropeless=frozenset(layer for layer, own in enumerate(windows) if window and own is None),
        feed_forwards=on_layers(fields, experts, _sparse(fields, first)),
    )


def _with_own_names(fields: Fields, num_experts: int, size: int) -> ExpertSwitches:
    """`corrected` where config.json has num_experts and num_shared_experts."""
    size = fields.integer("moe_intermediate_size", size)
    experts = corrected(fields, fields.integer("num_experts", num_experts), scale=2.5)
    return replace(experts, shared_size=fields.integer("num_shared_experts", 1) * size)


def _sparse(fields: Fields, first: int) -> Callable[[int], bool]:
    """Whether a layer has experts: by mlp_layer_types, else from the first one on."""
    types = fields.texts("mlp_layer_types")
    return lambda layer: types[layer] == "sparse" if types else layer >= first
