"""How the layers of a family mix tokens: sliding windows, and switches of all that is no plain attention.

The switches are attention to chunks or with temperatures, attention with gates, the gated delta rule, the recurrence of
Griffin, and short convolutions.
"""

from collections.abc import Callable
from dataclasses import dataclass

from weft.engine.families.switches import MixerSwitches
from weft.engine.fields import Fields
from weft.engine.wire.errors import ModelError


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


def bloom_slopes(num_heads: int) -> tuple[float, ...]:
    """Of ALiBi: 2 ** (-8 i / n) for the largest power of two n; further heads get every second slope of 2 n heads."""
    whole = 1 << (num_heads.bit_length() - 1)
    firsts = [2.0 ** (-8 * index / whole) for index in range(1, whole + 1)]
    return (*firsts, *(2.0 ** (-4 * index / whole) for index in range(1, 2 * (num_heads - whole), 2)))


def read_layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Sliding windows of Qwen checkpoints: if switched on, by layer_types, else in layers from max_window_layers on."""
    window = fields.optional_integer("sliding_window")
    by_type = windows_by_type(fields, window)
    if window is None or not fields.flag("use_sliding_window", False):
        return ()
    first = fields.integer("max_window_layers", 28)
    by_index = tuple(window if layer >= first else None for layer in range(fields.integer("num_hidden_layers")))
    return by_type or by_index


def read_layer_types(fields: Fields, default: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """The kind of every layer, one of those known."""
    layer_types = fields.texts("layer_types") or default
    num_layers = fields.integer("num_hidden_layers")
    if len(layer_types) != num_layers or not set(layer_types) <= set(known):
        raise fields.wrong("layer_types", f"a list of {num_layers} of {', '.join(known)}")
    return layer_types


@dataclass(frozen=True, slots=True)
class AttentionSwitches(MixerSwitches):
    """Softmax attention that differs from that of other layers.

    It sees chunks of the context, or its scores grow with the query's position.

    Attributes:
        index: Of the layer.
        span: See `PagedKV`.
        is_tuned: Whether queries are multiplied by the family's temperature.
        has_head_norms: Whether the family's norm of queries and keys counts here.
    """

    index: int
    span: int | None = None
    is_tuned: bool = False
    has_head_norms: bool = True


@dataclass(frozen=True, slots=True)
class DeltaSwitches(MixerSwitches):
    """Linear attention by the gated delta rule; see `weft.engine.parts.gated_recurrence`.

    Attributes:
        kernel: Tokens that the convolution sees.
        prefix: Of the tensors' names, behind the name of the layer.
        projections: Names of the matrices of queries, keys and values, gate, rates, decays; the first three together or
            each by itself.
        is_grouped: There are two matrices instead, of queries to gate and of the others, stacked by key heads.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    prefix: str = "linear_attn"
    projections: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    is_grouped: bool = False
    norm: str = "norm"
    output: str = "out_proj"


@dataclass(frozen=True, slots=True)
class ShortConvolutionSwitches(MixerSwitches):
    """A convolution between two gates; see `weft.engine.parts.linear_attention`.

    Attributes:
        kernel: Tokens that it sees.
    """

    kernel: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class GatedRecurrenceSwitches(MixerSwitches):
    """The recurrence of Griffin; see `weft.engine.parts.gated_recurrence`.

    Attributes:
        width: Channels.
        kernel: Tokens that the convolution sees.
    """

    width: int
    kernel: int


@dataclass(frozen=True, slots=True)
class GatedAttentionSwitches(MixerSwitches):
    """Softmax attention with gates behind the queries of each head; see `weft.engine.parts.linear_attention`.

    Attributes:
        index: Of the layer.
    """

    index: int
