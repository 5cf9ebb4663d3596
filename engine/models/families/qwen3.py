"""Qwen3, dense: QK-norm, and a head size that is independent of the hidden size."""

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, QKNorm, family
from weft.engine.models.families.windows import read_layer_windows


@family("Qwen3ForCausalLM")
def qwen3(fields: Fields) -> FamilySwitches:
    """Biases by config.json, sliding windows as in Qwen2."""
    return FamilySwitches(
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=QKNorm(),
        sliding_windows=read_layer_windows(fields),
        head_dim=128,
    )
