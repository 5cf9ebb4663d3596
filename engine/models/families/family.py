"""The switches in which families of models differ; each family's file maps a config.json to them."""

from collections.abc import Callable
from dataclasses import dataclass

from weft.engine.models.families.fields import Fields
from weft.engine.shared.errors import ModelError


@dataclass(frozen=True, slots=True)
class FamilySwitches:
    """The part of a `ModelConfig` that is read differently from family to family.

    Attributes:
        qkv_bias, o_bias, mlp_bias: Whether these projections have a bias.
        qk_norm: RMSNorm over each head of queries and keys before the rotary embedding.
        sliding_windows: Per layer the window in tokens, None for full attention; empty means full attention everywhere.
        head_dim: Default if config.json gives none; None means hidden_size / num_attention_heads.
        norm_offset: Added to the stored weights of norms over hidden states.
        has_post_norms: Also RMSNorm over the outputs of attention and feed-forward layer, before they are added.
        embedding_scale: Multiplier of embeddings, in the model's dtype.
        attention_scale: Multiplier of scores; None means head_dim ** -0.5.
        attention_soft_cap, logit_soft_cap: Scores or logits become cap * tanh(x / cap); None means no cap.
        activation: Of the feed-forward layers; None means hidden_act of config.json, else SiLU.
        ties_embeddings: Default of tie_word_embeddings: the output head shares the matrix of the embedding.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    head_dim: int | None = None
    norm_offset: float = 0.0
    has_post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    activation: str | None = None
    ties_embeddings: bool = False


Family = Callable[[Fields], FamilySwitches]


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


def read_layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Sliding windows of Qwen checkpoints: if switched on, by layer_types, else in layers from max_window_layers on."""
    window = fields.optional_integer("sliding_window")
    if window is None or not fields.flag("use_sliding_window", False):
        return ()
    first = fields.integer("max_window_layers", 28)
    by_index = tuple(window if layer >= first else None for layer in range(fields.integer("num_hidden_layers")))
    return windows_by_type(fields, window) or by_index
