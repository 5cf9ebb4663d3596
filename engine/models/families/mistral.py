"""Mistral: Llama's layers, with one sliding window for all of them in the first release."""

from weft.engine.models.families.family import FamilySwitches, read_window
from weft.engine.models.families.fields import Fields


def mistral(fields: Fields) -> FamilySwitches:
    """A window that is not mentioned is that of the first release."""
    return FamilySwitches(sliding_windows=(read_window(fields, 4096),) * fields.integer("num_hidden_layers"))
