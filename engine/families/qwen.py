"""Families of Qwen, dense, with experts and with linear attention, and OLMoE and FlexOLMo, which have Qwen's router."""

from dataclasses import replace

from weft.engine.families import attention
from weft.engine.families.attention import windows_where
from weft.engine.families.experts import ExpertNames, ExpertSwitches, TopK, on_layers
from weft.engine.families.switches import FamilySwitches, Norms, QKNorm, TensorNames, UseModule, family
from weft.engine.fields import Fields


@family("Qwen2ForCausalLM")
def qwen2(fields: Fields) -> FamilySwitches:
    """Qwen2 and Qwen2.5: biases on queries, keys and values; windows in upper layers if switched on.

    The biases are part of the architecture; config.json does not mention them.
    """
    return FamilySwitches(qkv_bias=True, o_bias=False, sliding_windows=attention.read_layer_windows(fields))


@family("Qwen3ForCausalLM")
def qwen3(fields: Fields) -> FamilySwitches:
    """QK-norm, and a head size that is independent of the hidden size.

    Biases are by config.json, sliding windows as in Qwen2.
    """
    return FamilySwitches(
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=QKNorm(),
        sliding_windows=attention.read_layer_windows(fields),
        head_dim=128,
    )


_SHARED = ExpertNames(
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)


@family("Qwen2MoeForCausalLM")
def qwen2_moe(fields: Fields) -> FamilySwitches:
    """A shared expert with a gate of its own; windows, if switched on, are in every second of the lower layers."""
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    first_full = fields.integer("max_window_layers", 28)
    windows = windows_where(fields, window, lambda layer: layer < first_full and layer % 2 == 0) if window else ()
    experts = replace(
        _softmax_experts(fields, 60, 4),
        names=_SHARED,
        shared_size=fields.integer("shared_expert_intermediate_size", 5632),
    )
    return FamilySwitches(
        qkv_bias=fields.flag("qkv_bias", True),
        o_bias=False,
        sliding_windows=windows,
        feed_forwards=_on_sparse_layers(fields, experts),
    )


@family("Qwen3MoeForCausalLM")
def qwen3_moe(fields: Fields) -> FamilySwitches:
    """QK-norm; every layer has the same window, if it is switched on."""
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    return FamilySwitches(
        defaults={"num_key_value_heads": 4},
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=QKNorm(),
        sliding_windows=(window,) * fields.integer("num_hidden_layers"),
        feed_forwards=_on_sparse_layers(fields, _softmax_experts(fields, 128, 8)),
    )


@family("OlmoeForCausalLM")
def olmoe(fields: Fields) -> FamilySwitches:
    """Norms over all heads of queries and of keys."""
    if fields.has("clip_qkv"):
        raise UseModule("clip_qkv: values are not clipped behind norms by Weft's blocks")
    experts = replace(_softmax_experts(fields, 64, 8), size=fields.integer("intermediate_size"))
    return FamilySwitches(
        defaults={"rms_norm_eps": 1e-5},
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=QKNorm(over_all=True),
        feed_forwards=on_layers(fields, experts),
    )


@family("FlexOlmoForCausalLM")
def flex_olmo(fields: Fields) -> FamilySwitches:
    """OLMoE with norms behind both halves instead of before them."""
    experts = replace(_softmax_experts(fields, 7, 5), size=fields.integer("intermediate_size"))
    return replace(
        olmoe(fields),
        defaults={"rope_theta": 5e5},
        names=TensorNames(),
        norms=Norms.AFTER,
        feed_forwards=on_layers(fields, experts),
    )


def _softmax_experts(fields: Fields, num_experts: int, num_chosen: int) -> ExpertSwitches:
    """Experts whose shares are softmax scores; the numbers are those that config.json may leave out."""
    routing = TopK(fields.integer("num_experts_per_tok", num_chosen), divides=fields.flag("norm_topk_prob", False))
    return ExpertSwitches(
        num_experts=fields.integer("num_experts", fields.integer("num_local_experts", num_experts)),
        size=fields.integer("moe_intermediate_size", 0),
        routing=routing,
    )


def _on_sparse_layers(fields: Fields, experts: ExpertSwitches) -> tuple[ExpertSwitches | None, ...]:
    """Experts in every decoder_sparse_step-th layer that is not among mlp_only_layers."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    return on_layers(fields, experts, lambda layer: layer not in dense and (layer + 1) % step == 0)


_LINEAR, _FULL = "linear_attention", "full_attention"


@family("Qwen3_5ForCausalLM")
def qwen3_5(fields: Fields) -> FamilySwitches:
    """Qwen3.5, dense."""
    return _hybrid(fields, _delta(fields))


@family("Qwen3_5MoeForCausalLM")
def qwen3_5_moe(fields: Fields) -> FamilySwitches:
    """Qwen3.5 with experts in all layers, whose shares always sum to 1."""
    routing = TopK(fields.integer("num_experts_per_tok", 8), divides=True)
    experts = replace(_hybrid_experts(fields, 256, 8), routing=routing)
    num_layers = fields.integer("num_hidden_layers")
    switches = replace(_hybrid(fields, _delta(fields)), feed_forwards=(experts,) * num_layers)
    return replace(switches, defaults={**switches.defaults, "intermediate_size": experts.shared_size})


@family("Qwen3NextForCausalLM")
def qwen3_next(fields: Fields) -> FamilySwitches:
    """Qwen3.5's layers with experts; in its linear attention's two matrices the rows of a key head stand together."""
    delta = replace(_delta(fields), projections=("in_proj_qkvz", "in_proj_ba"), is_grouped=True)
    return replace(_hybrid(fields, delta), feed_forwards=_on_sparse_layers(fields, _hybrid_experts(fields, 512, 10)))


def _hybrid_experts(fields: Fields, num_experts: int, num_chosen: int) -> ExpertSwitches:
    experts = _softmax_experts(fields.with_defaults({"norm_topk_prob": True}), num_experts, num_chosen)
    shared_size = fields.integer("shared_expert_intermediate_size", 512)
    return replace(experts, size=experts.size or 512, names=_SHARED, shared_size=shared_size)


def _delta(fields: Fields) -> attention.DeltaSwitches:
    return attention.DeltaSwitches(
        num_key_heads=fields.integer("linear_num_key_heads", 16),
        num_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel=fields.integer("linear_conv_kernel_dim", 4),
    )


def _hybrid(fields: Fields, delta: attention.DeltaSwitches) -> FamilySwitches:
    """Three layers of linear attention for each one of gated attention; norm weights are stored minus 1."""
    interval = fields.integer("full_attention_interval", 4)
    indices = range(fields.integer("num_hidden_layers"))
    default = tuple(_LINEAR if (index + 1) % interval else _FULL for index in indices)
    layer_types = attention.read_layer_types(fields, default, (_LINEAR, _FULL))
    return FamilySwitches(
        defaults={"partial_rotary_factor": 0.25},
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=QKNorm(offset=1.0),
        mixers=tuple(delta if layer_types[i] == _LINEAR else attention.GatedAttentionSwitches(i) for i in indices),
        head_dim=256,
        norm_offset=1.0,
    )
