"""Qwen3-Next and Qwen3.5: three layers of linear attention for each one of gated attention; norm weights minus 1."""

from weft.engine.models.families.family import FamilySwitches, QKNorm
from weft.engine.models.families.fields import Fields
from weft.engine.models.families.linear_attention import DeltaSwitches, GatedAttentionSwitches, read_layer_types

_LINEAR, _FULL = "linear_attention", "full_attention"


def qwen3_5(fields: Fields) -> FamilySwitches:
    """Qwen3.5, dense."""
    delta = DeltaSwitches(
        num_key_heads=fields.integer("linear_num_key_heads", 16),
        num_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel=fields.integer("linear_conv_kernel_dim", 4),
    )
    interval = fields.integer("full_attention_interval", 4)
    indices = range(fields.integer("num_hidden_layers"))
    default = tuple(_LINEAR if (index + 1) % interval else _FULL for index in indices)
    layer_types = read_layer_types(fields, default, (_LINEAR, _FULL))
    attention_bias = fields.flag("attention_bias", False)
    return FamilySwitches(
        defaults={"partial_rotary_factor": 0.25},
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=QKNorm(offset=1.0),
        mixers=tuple(delta if layer_types[i] == _LINEAR else GatedAttentionSwitches(i) for i in indices),
        head_dim=256,
        norm_offset=1.0,
    )
