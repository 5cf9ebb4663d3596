"""Qwen2 and Qwen2.5: biases on queries, keys and values; sliding windows in upper layers if switched on."""

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, family
from weft.engine.models.families.windows import read_layer_windows


@family("Qwen2ForCausalLM")
def qwen2(fields: Fields) -> FamilySwitches:
    """The biases are part of the architecture; config.json does not mention them."""
    return FamilySwitches(qkv_bias=True, o_bias=False, sliding_windows=read_layer_windows(fields))
