"""LFM2: short convolutions, and attention in some layers; LFM2-MoE has experts."""

from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.layers.routing import TopK
from weft.engine.models.families.experts import ExpertNames, ExpertSwitches, on_layers
from weft.engine.models.families.family import FamilySwitches, QKNorm, family
from weft.engine.models.families.linear_attention import ShortConvolutionSwitches, SizedFeedForward, read_layer_types
from weft.engine.models.families.names import TensorNames

_CONVOLUTION, _FULL = "conv", "full_attention"
_NAMES = TensorNames(
    norm="model.embedding_norm",
    mixer_norm="operator_norm",
    feed_forward_norm="ffn_norm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)


_EXPERTS = ExpertNames(
    router="feed_forward.gate",
    gate_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    down="feed_forward.experts.{}.w2",
)


@family("Lfm2ForCausalLM")
def lfm2(fields: Fields) -> FamilySwitches:
    """One dense layer for all tokens, of a size that has to be computed."""
    feed_forward = SizedFeedForward(_intermediate_size(fields))
    return replace(_hybrid(fields), feed_forwards=(feed_forward,) * fields.integer("num_hidden_layers"))


@family("Lfm2MoeForCausalLM")
def lfm2_moe(fields: Fields) -> FamilySwitches:
    """Experts with sigmoid scores behind the first, dense layers."""
    routing = TopK(
        fields.integer("num_experts_per_tok", 4),
        scores="sigmoid",
        divides=fields.flag("norm_topk_prob", True),
        epsilon=1e-6,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    names = replace(_EXPERTS, correction="feed_forward.expert_bias" if fields.flag("use_expert_bias", True) else "")
    size, num_experts = fields.integer("moe_intermediate_size", 1792), fields.integer("num_experts", 32)
    experts, num_dense = ExpertSwitches(num_experts, size, routing, names), fields.integer("num_dense_layers", 2)
    return replace(_hybrid(fields), feed_forwards=on_layers(fields, experts, lambda layer: layer >= num_dense))


def _hybrid(fields: Fields) -> FamilySwitches:
    """Short convolutions and attention; by default all layers have attention."""
    num_layers = fields.integer("num_hidden_layers")
    attending = fields.integers("full_attn_idxs") if fields.has("full_attn_idxs") else range(num_layers)
    default = tuple(_FULL if layer in attending else _CONVOLUTION for layer in range(num_layers))
    layer_types = read_layer_types(fields, default, (_CONVOLUTION, _FULL))
    convolution = ShortConvolutionSwitches(fields.integer("conv_L_cache", 3), fields.flag("conv_bias", False))
    return FamilySwitches(
        names=_NAMES,
        defaults={"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
        qk_norm=QKNorm(),
        mixers=tuple(convolution if layer_type == _CONVOLUTION else None for layer_type in layer_types),
        ties_embeddings=fields.flag("tie_embedding", True),
    )


def _intermediate_size(fields: Fields) -> int:
    """Two thirds of what config.json says, times a factor, rounded up."""
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.integer("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple
