"""Families with Qwen's router: Qwen2-MoE with its shared expert, Qwen3-MoE, OLMoE and FlexOLMo."""

from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.layers.routing import TopK
from weft.engine.models.families.experts import ExpertNames, ExpertSwitches, on_layers
from weft.engine.models.families.family import FamilySwitches, Norms, QKNorm, UseModule, family
from weft.engine.models.families.names import TensorNames
from weft.engine.models.families.windows import windows_where

SHARED = ExpertNames(
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
        qwen_experts(fields, 60, 4),
        names=SHARED,
        shared_size=fields.integer("shared_expert_intermediate_size", 5632),
    )
    return FamilySwitches(
        qkv_bias=fields.flag("qkv_bias", True),
        o_bias=False,
        sliding_windows=windows,
        feed_forwards=sparse_layers(fields, experts),
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
        feed_forwards=sparse_layers(fields, qwen_experts(fields, 128, 8)),
    )


@family("OlmoeForCausalLM")
def olmoe(fields: Fields) -> FamilySwitches:
    """Norms over all heads of queries and of keys."""
    if fields.has("clip_qkv"):
        raise UseModule("clip_qkv: values are not clipped behind norms by Weft's blocks")
    experts = replace(qwen_experts(fields, 64, 8), size=fields.integer("intermediate_size"))
    return FamilySwitches(
        defaults={"rms_norm_eps": 1e-5},
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=QKNorm(over_all=True),
        feed_forwards=on_layers(fields, experts),
    )


@family("FlexOlmoForCausalLM")
def flex_olmo(fields: Fields) -> FamilySwitches:
    """OLMoE with norms behind both halves instead of before them."""
    experts = replace(qwen_experts(fields, 7, 5), size=fields.integer("intermediate_size"))
    return replace(
        olmoe(fields),
        defaults={"rope_theta": 5e5},
        names=TensorNames(),
        norms=Norms.AFTER,
        feed_forwards=on_layers(fields, experts),
    )


def qwen_experts(fields: Fields, num_experts: int, num_chosen: int) -> ExpertSwitches:
    """Experts whose shares are softmax scores; the numbers are those that config.json may leave out."""
    routing = TopK(fields.integer("num_experts_per_tok", num_chosen), divides=fields.flag("norm_topk_prob", False))
    return ExpertSwitches(
        num_experts=fields.integer("num_experts", fields.integer("num_local_experts", num_experts)),
        size=fields.integer("moe_intermediate_size", 0),
        routing=routing,
    )


def sparse_layers(fields: Fields, experts: ExpertSwitches) -> tuple[ExpertSwitches | None, ...]:
    """Experts in every decoder_sparse_step-th layer that is not among mlp_only_layers."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    return on_layers(fields, experts, lambda layer: layer not in dense and (layer + 1) % step == 0)
