"""Mistral: Llama's layers; in the first release all have the same sliding window."""

from weft.engine.models.families.family import FamilySwitches, family
from weft.engine.models.families.fields import Fields
from weft.engine.models.families.windows import read_window, windows_where


@family("MistralForCausalLM")
def mistral(fields: Fields) -> FamilySwitches:
    """The default window is that of the first release."""
    windows = (read_window(fields, 4096),) * fields.integer("num_hidden_layers")
    return FamilySwitches(sliding_windows=windows, defaults={"num_key_value_heads": 8})


@family("MinistralForCausalLM")
def ministral(fields: Fields) -> FamilySwitches:
    """Layers may differ in their windows."""
    windows = windows_where(fields, read_window(fields, 4096), lambda layer: True)
    return FamilySwitches(sliding_windows=windows, defaults={"num_key_value_heads": 8})
