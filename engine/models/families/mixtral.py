"""Mixtral, and families whose experts have its names: Phi-MoE with its sparse mixer, MiniMax M2 with sigmoid scores."""

from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.layers.routing import SparseMixer, TopK
from weft.engine.models.families.experts import MIXTRAL, ExpertNames, ExpertSwitches, on_layers
from weft.engine.models.families.family import FamilySwitches, Norm, QKNorm, UseModule, family
from weft.engine.models.families.windows import read_window


@family("MixtralForCausalLM")
def mixtral(fields: Fields) -> FamilySwitches:
    """Shares are divided by their sum."""
    experts = _experts(fields, 8)
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
    mixer = SparseMixer(fields.integer("num_experts_per_tok", 2), 2 * fields.number("router_jitter_noise", 0.01))
    return FamilySwitches(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        norm=Norm.LAYER_NORM,
        qkv_bias=fields.flag("attention_bias", False),
        head_bias=fields.flag("lm_head_bias", False),
        sliding_windows=(read_window(fields, 0) or None,) * fields.integer("num_hidden_layers"),
        feed_forwards=on_layers(fields, replace(_experts(fields, 16), routing=mixer)),
    )


@family("MiniMaxM2ForCausalLM")
def minimax_m2(fields: Fields) -> FamilySwitches:
    """Norms over all heads of queries and of keys, and a correction bias beside the router."""
    names = replace(MIXTRAL, correction="block_sparse_moe.e_score_correction_bias")
    routing = TopK(fields.integer("num_experts_per_tok", 8), scores="sigmoid", divides=True)
    return FamilySwitches(
        defaults={"rope_theta": 5e6, "num_key_value_heads": 8},
        qk_norm=QKNorm(over_all=True),
        head_dim=128,
        feed_forwards=on_layers(fields, replace(_experts(fields, 256, names), routing=routing)),
    )


def _experts(fields: Fields, num_experts: int, names: ExpertNames = MIXTRAL) -> ExpertSwitches:
    return ExpertSwitches(
        num_experts=fields.integer("num_local_experts", num_experts),
        size=fields.integer("intermediate_size"),
        routing=TopK(fields.integer("num_experts_per_tok", 2), divides=True),
        names=names,
    )
