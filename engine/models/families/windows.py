"""Reads sliding windows: which layers of a checkpoint have one, and of how many tokens."""

from collections.abc import Callable

from weft.engine.fields import Fields
from weft.engine.shared.errors import ModelError


def read_window(fields: Fields, default: int) -> int | None:
    """The sliding window: null means full attention, an absent field means the default."""
    window = fields.optional_integer("sliding_window")
    return default if window is None and not fields.mentions("sliding_window") else window


def windows_by_type(fields: Fields, window: int | None) -> tuple[int | None, ...]:
    """The window or None for each layer, by layer_types; empty if that is absent."""
    layer_types = fields.texts("layer_types")
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"layer type {min(unknown)} is not supported (full_attention, sliding_attention)")
    num_layers = fields.integer("num_hidden_layers")
    if layer_types and len(layer_types) != num_layers:
        raise fields.wrong("layer_types", f"a list of {num_layers} layer types")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def windows_where(fields: Fields, window: int | None, has_window: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window or None for each layer, by layer_types, else by index."""
    by_index = tuple(window if has_window(layer) else None for layer in range(fields.integer("num_hidden_layers")))
    return windows_by_type(fields, window) or by_index


def windows_by_pattern(fields: Fields, window: int | None, period: int) -> tuple[int | None, ...]:
    """The window for each layer by layer_types, else full attention in the last layer of every period layers."""
    by_type = windows_by_type(fields, window)
    if by_type:
        return by_type
    if isinstance(fields.raw("sliding_window_pattern"), str):  # such as LLLG
        period = len(fields.optional_text("sliding_window_pattern") or "")
    else:
        period = fields.integer("sliding_window_pattern", period)
    return tuple(window if (layer + 1) % period else None for layer in range(fields.integer("num_hidden_layers")))


def windowless(windows: tuple[int | None, ...]) -> frozenset[int]:
    """Indices of the layers with full attention."""
    return frozenset(layer for layer, window in enumerate(windows) if window is None)


def read_layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Sliding windows of Qwen checkpoints: if switched on, by layer_types, else in layers from max_window_layers on."""
    window = fields.optional_integer("sliding_window")
    by_type = windows_by_type(fields, window)
    if window is None or not fields.flag("use_sliding_window", False):
        return ()
    first = fields.integer("max_window_layers", 28)
    by_index = tuple(window if layer >= first else None for layer in range(fields.integer("num_hidden_layers")))
    return by_type or by_index
