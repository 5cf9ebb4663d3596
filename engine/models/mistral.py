"""Mistral: Llama's layers, with one sliding window for all of them in the first release."""

from engine.models.family import FamilySwitches
from engine.models.fields import Fields

_DEFAULT_WINDOW = 4096


def mistral(fields: Fields) -> FamilySwitches:
    """A window that is null means full attention; one that is not mentioned is that of the first release."""
    window = fields.optional_integer("sliding_window")
    if window is None and not fields.mentions("sliding_window"):
        window = _DEFAULT_WINDOW
    return FamilySwitches(sliding_windows=(window,) * fields.integer("num_hidden_layers"))
