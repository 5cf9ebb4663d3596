"""Families of mixtures of experts, and the dense models of the same makers.

Names of the experts' tensors and the choice of experts differ most:

- Hunyuan and Granite have names of their own, and dense models; HyperCLOVA X is one like Granite's.
- Mixtral, Phi-MoE and MiniMax M2 have Mixtral's names.
- gpt-oss has experts with biases and limits.
- GLM 4.5, Sarvam, dots.1, Solar, ERNIE 4.5 and EXAONE have Qwen's names, and most have DeepSeek V3's router.
"""

from collections.abc import Callable
from dataclasses import replace

from weft.engine.families import experts as moe
from weft.engine.families.attention import read_window, windows_by_pattern, windows_where
from weft.engine.families.experts import ExpertNames, ExpertSwitches, TopK, corrected, on_layers
from weft.engine.families.llama import llama
from weft.engine.families.switches import FamilySwitches, Norm, Norms, QKNorm, TensorNames, UseModule, family
from weft.engine.fields import Fields

_HUNYUAN_EXPERTS = ExpertNames(
    router="mlp.gate.wg",
    shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_down="mlp.shared_mlp.down_proj",
)


@family("HunYuanDenseV1ForCausalLM")
def hunyuan_v1_dense(fields: Fields) -> FamilySwitches:
    """QK-norm behind the rotary embedding; Llama's layers otherwise."""
    names = TensorNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
    return replace(
        llama(fields), names=names, mlp_bias=False, qk_norm=QKNorm(is_last=True), defaults={"rms_norm_eps": 1e-5}
    )


@family("HunYuanMoEV1ForCausalLM")
def hunyuan_v1_moe(fields: Fields) -> FamilySwitches:
    """Dense Hunyuan with experts: each layer may have and choose another number, and has one for all tokens."""
    size, num_layers = fields.integer("intermediate_size"), fields.integer("num_hidden_layers")
    counts, chosen = (
        values * num_layers if len(values) == 1 else values
        for values in (fields.integers("num_experts") or (1,), fields.integers("moe_topk") or (1,))
    )
    experts = tuple(
        ExpertSwitches(count, size, TopK(best, divides=True), _HUNYUAN_EXPERTS, shared_size=size)
        for count, best in zip(counts, chosen, strict=True)
    )
    return replace(hunyuan_v1_dense(fields), feed_forwards=experts)


GRANITE_EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    gate_up=("block_sparse_moe.input_linear",),
    down="block_sparse_moe.output_linear",
    shared_gate_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
)


@family("GraniteForCausalLM")
def granite(fields: Fields) -> FamilySwitches:
    """Granite 3: Llama's layers with multipliers of embeddings, residuals, scores and logits.

    Logits are divided by logits_scaling.
    """
    return replace(
        llama(fields),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


@family("HyperCLOVAXForCausalLM")
def hyperclovax(fields: Fields) -> FamilySwitches:
    """Granite's multipliers, but logits are multiplied by logits_scaling. Each half may end with a norm."""
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    names = TensorNames(mixer_post_norm="post_norm1", feed_forward_post_norm="post_norm2")
    return replace(
        granite(fields),
        names=names,
        norms=Norms.AROUND if fields.flag("use_post_norm", True) else Norms.BEFORE,
        attention_scale=fields.number("attention_multiplier", head_dim**-0.5),
        logit_scale=fields.number("logits_scaling", 1.0),
    )


@family("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
def granitemoe(fields: Fields) -> FamilySwitches:
    """Experts, all in one tensor, whose shares are the softmax of the chosen; one may be for all tokens."""
    experts = ExpertSwitches(
        num_experts=fields.integer("num_local_experts", 8),
        size=fields.integer("intermediate_size"),
        routing=TopK(fields.integer("num_experts_per_tok", 2), scores=None, shares="softmax"),
        names=GRANITE_EXPERTS,
        shared_size=fields.integer("shared_intermediate_size", 0),
    )
    return replace(
        granite(fields),
        attention_scale=fields.number("attention_multiplier", 1.0),
        mlp_bias=False,
        feed_forwards=on_layers(fields, experts),
    )


@family("MixtralForCausalLM")
def mixtral(fields: Fields) -> FamilySwitches:
    """Shares are divided by their sum."""
    experts = _mixtral_experts(fields, 8)
    return FamilySwitches(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        sliding_windows=(fields.optional_integer("sliding_window"),) * fields.integer("num_hidden_layers"),
        feed_forwards=on_layers(fields, experts),
    )


@family("PhimoeForCausalLM")
def phimoe(fields: Fields) -> FamilySwitches:
    """LayerNorm; a choice is sparse if the jitter of training says so."""
    scaling = fields.section("rope_scaling")
    if scaling.names() or fields.section("rope_parameters").optional_text("rope_type") not in (None, "default"):
        raise UseModule("rope_scaling: its short_mscale and long_mscale are not computed by Weft's blocks")
    mixer = moe.SparseMixer(fields.integer("num_experts_per_tok", 2), 2 * fields.number("router_jitter_noise", 0.01))
    return FamilySwitches(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        norm=Norm.LAYER_NORM,
        qkv_bias=fields.flag("attention_bias", False),
        head_bias=fields.flag("lm_head_bias", False),
        sliding_windows=(read_window(fields, 0) or None,) * fields.integer("num_hidden_layers"),
        feed_forwards=on_layers(fields, replace(_mixtral_experts(fields, 16), routing=mixer)),
    )


@family("MiniMaxM2ForCausalLM")
def minimax_m2(fields: Fields) -> FamilySwitches:
    """Sigmoid scores with a correction bias beside the router; norms over all heads of queries and of keys."""
    names = replace(moe.MIXTRAL, correction="block_sparse_moe.e_score_correction_bias")
    routing = TopK(fields.integer("num_experts_per_tok", 8), scores="sigmoid", divides=True)
    return FamilySwitches(
        defaults={"rope_theta": 5e6, "num_key_value_heads": 8},
        qk_norm=QKNorm(over_all=True),
        head_dim=128,
        feed_forwards=on_layers(fields, replace(_mixtral_experts(fields, 256, names), routing=routing)),
    )


def _mixtral_experts(fields: Fields, num_experts: int, names: ExpertNames = moe.MIXTRAL) -> ExpertSwitches:
    return ExpertSwitches(
        num_experts=fields.integer("num_local_experts", num_experts),
        size=fields.integer("intermediate_size"),
        routing=TopK(fields.integer("num_experts_per_tok", 2), divides=True),
        names=names,
    )


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@family("GptOssForCausalLM")
def gpt_oss(fields: Fields) -> FamilySwitches:
    """Attention sinks, windows in every second layer, and experts with biases and limits.

    The checkpoint has all experts in one tensor, as (inputs, outputs), with gate and up in turn; GGUF has not.
    """
    are_separate = fields.flag("has_separate_experts", False)
    limit, slope = fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", 1.702)
    names = ExpertNames("mlp.router", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj", ("", "_bias"))
    experts = ExpertSwitches(
        num_experts=fields.integer("num_local_experts", 128),
        size=fields.integer("intermediate_size", 2880),
        routing=TopK(fields.integer("num_experts_per_tok", 4), scores=None, shares="softmax"),
        names=ExpertNames(router="mlp.router") if are_separate else names,
        gating=moe.Gating(limit=limit, slope=slope, up_offset=1.0),
        router_bias=True,
        expert_bias=True,
        is_transposed=not are_separate,
        is_interleaved=not are_separate,
    )
    return FamilySwitches(
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "num_key_value_heads": 8,
            "rope_parameters": _GPT_OSS_ROPE,
        },
        qkv_bias=fields.flag("attention_bias", True),
        sinks="self_attn.sinks",
        sliding_windows=windows_where(fields, read_window(fields, 128), lambda layer: layer % 2 == 0),
        head_dim=64,
        feed_forwards=on_layers(fields, experts),
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
        has_draft_heads=True,
    )


_SARVAM = TensorNames(
    embedding="model.word_embeddings",
    qkv=("attention.query_key_value",),
    query_norm="attention.query_layernorm",
    key_norm="attention.key_layernorm",
    output="attention.dense",
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
    names = replace(_HUNYUAN_EXPERTS, router="mlp.router.gate", correction="mlp.expert_bias")
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
