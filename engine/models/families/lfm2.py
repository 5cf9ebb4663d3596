"""LFM2: short convolutions, and attention in some layers."""

from weft.engine.models.families.family import FamilySwitches, QKNorm
from weft.engine.models.families.fields import Fields
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


def lfm2(fields: Fields) -> FamilySwitches:
    """By default all layers have attention."""
    num_layers = fields.integer("num_hidden_layers")
    attending = fields.integers("full_attn_idxs") if fields.has("full_attn_idxs") else range(num_layers)
    default = tuple(_FULL if layer in attending else _CONVOLUTION for layer in range(num_layers))
    layer_types = read_layer_types(fields, default, (_CONVOLUTION, _FULL))
    convolution = ShortConvolutionSwitches(fields.integer("conv_L_cache", 3), fields.flag("conv_bias", False))
    return FamilySwitches(
        names=_NAMES,
        defaults={"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5},
        qk_norm=QKNorm(),
        mixers=tuple(convolution if layer_type == _CONVOLUTION else None for layer_type in layer_types),
        feed_forwards=(SizedFeedForward(_intermediate_size(fields)),) * num_layers,
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
