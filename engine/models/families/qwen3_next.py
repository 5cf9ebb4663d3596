"""Qwen3-Next and Qwen3.5: three layers of linear attention for each one of gated attention; norm weights minus 1."""

from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.layers.routing import TopK
from weft.engine.models.families.experts import ExpertSwitches
from weft.engine.models.families.family import FamilySwitches, QKNorm, family
from weft.engine.models.families.linear_attention import DeltaSwitches, GatedAttentionSwitches, read_layer_types
from weft.engine.models.families.qwen_moe import SHARED, qwen_experts, sparse_layers

_LINEAR, _FULL = "linear_attention", "full_attention"


@family("Qwen3_5ForCausalLM")
def qwen3_5(fields: Fields) -> FamilySwitches:
    """Qwen3.5, dense."""
    return _hybrid(fields, _delta(fields))


@family("Qwen3_5MoeForCausalLM")
def qwen3_5_moe(fields: Fields) -> FamilySwitches:
    """Qwen3.5 with experts in all layers, whose shares always sum to 1."""
    routing = TopK(fields.integer("num_experts_per_tok", 8), divides=True)
    experts = replace(_experts(fields, 256, 8), routing=routing)
    num_layers = fields.integer("num_hidden_layers")
    switches = replace(_hybrid(fields, _delta(fields)), feed_forwards=(experts,) * num_layers)
    return replace(switches, defaults={**switches.defaults, "intermediate_size": experts.shared_size})


@family("Qwen3NextForCausalLM")
def qwen3_next(fields: Fields) -> FamilySwitches:
    """Its linear attention has two matrices, in which the rows of each key head stand together."""
    delta = replace(_delta(fields), projections=("in_proj_qkvz", "in_proj_ba"), is_grouped=True)
    return replace(_hybrid(fields, delta), feed_forwards=sparse_layers(fields, _experts(fields, 512, 10)))


def _experts(fields: Fields, num_experts: int, num_chosen: int) -> ExpertSwitches:
    experts = qwen_experts(fields.with_defaults({"norm_topk_prob": True}), num_experts, num_chosen)
    shared_size = fields.integer("shared_expert_intermediate_size", 512)
    return replace(experts, size=experts.size or 512, names=SHARED, shared_size=shared_size)


def _delta(fields: Fields) -> DeltaSwitches:
    return DeltaSwitches(
        num_key_heads=fields.integer("linear_num_key_heads", 16),
        num_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel=fields.integer("linear_conv_kernel_dim", 4),
    )


def _hybrid(fields: Fields, delta: DeltaSwitches) -> FamilySwitches:
    interval = fields.integer("full_attention_interval", 4)
    indices = range(fields.integer("num_hidden_layers"))
    default = tuple(_LINEAR if (index + 1) % interval else _FULL for index in indices)
    layer_types = read_layer_types(fields, default, (_LINEAR, _FULL))
    return FamilySwitches(
        defaults={"partial_rotary_factor": 0.25},
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=QKNorm(offset=1.0),
        mixers=tuple(delta if layer_types[i] == _LINEAR else GatedAttentionSwitches(i) for i in indices),
        head_dim=256,
        norm_offset=1.0,
    )
