"""Qwen3, dense: RMSNorm over each head of queries and keys; head size independent of the hidden size."""

from weft.engine.models.families.family import FamilySwitches, read_layer_windows
from weft.engine.models.families.fields import Fields


def qwen3(fields: Fields) -> FamilySwitches:
    """Biases as config.json says, sliding windows as in Qwen2."""
    attention_bias = fields.flag("attention_bias", False)
    return FamilySwitches(
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        sliding_windows=read_layer_windows(fields),
        head_dim=128,
    )
