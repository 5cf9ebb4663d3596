"""Mistral: Llama's layers; in the first release all have the same sliding window."""

from weft.engine.models.families.family import FamilySwitches, read_window
from weft.engine.models.families.fields import Fields


def mistral(fields: Fields) -> FamilySwitches:
    """The default window is that of the first release."""
    return FamilySwitches(sliding_windows=(read_window(fields, 4096),) * fields.integer("num_hidden_layers"))
