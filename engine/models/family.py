"""What a family of models may differ in, and what its file in this folder maps a config.json to."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.models.errors import ModelError
from engine.models.fields import Fields


@dataclass(frozen=True, slots=True)
class FamilySwitches:
    """The part of a `ModelConfig` that is read differently from family to family.

    Attributes:
        qkv_bias, o_bias, mlp_bias: Which projections have a bias.
        qk_norm: RMSNorm over each head of queries and keys before the rotary embedding.
        sliding_windows: Per layer the window in tokens, None for full attention; empty means full attention everywhere.
        head_dim: Size of a head where config.json gives none; None means hidden_size / num_attention_heads.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    head_dim: int | None = None


Family = Callable[[Fields], FamilySwitches]


def read_layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Sliding windows as Qwen checkpoints give them: switched on, then by layer_types or from max_window_layers on."""
    window = fields.optional_integer("sliding_window")
    if window is None or not fields.flag("use_sliding_window", False):
        return ()
    num_layers = fields.integer("num_hidden_layers")
    layer_types = fields.texts("layer_types")
    if not layer_types:
        first = fields.integer("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"layer type {min(unknown)} is not supported (full_attention, sliding_attention)")
    if len(layer_types) != num_layers:
        raise fields.wrong("layer_types", f"a list of {num_layers} layer types")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)
