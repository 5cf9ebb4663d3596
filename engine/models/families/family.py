"""What a family of models may differ in, and what its file in this folder maps a config.json to."""

from collections.abc import Callable
from dataclasses import dataclass

from weft.engine.models.families.fields import Fields
from weft.engine.shared.errors import ModelError


@dataclass(frozen=True, slots=True)
class FamilySwitches:
    """The part of a `ModelConfig` that is read differently from family to family.

    Attributes:
        qkv_bias, o_bias, mlp_bias: Which projections have a bias.
        qk_norm: RMSNorm over each head of queries and keys before the rotary embedding.
        sliding_windows: Per layer the window in tokens, None for full attention; empty means full attention everywhere.
        head_dim: Size of a head where config.json gives none; None means hidden_size / num_attention_heads.
        norm_offset: What the checkpoint leaves out of the weights of norms over hidden states.
        has_post_norms: RMSNorm over what attention and feed-forward layer add to the hidden states, too.
        embedding_scale: What embeddings are multiplied with, in the model's dtype.
        attention_scale: What scores are multiplied with; None means head_dim ** -0.5.
        attention_soft_cap, logit_soft_cap: Scores, logits become cap * tanh(x / cap); None leaves them alone.
        activation: Of the feed-forward layers; None means hidden_act, or SiLU without one.
        ties_embeddings: Whether the output head is the embedding where config.json does not say.
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
    """A window that is null means full attention; one that is not mentioned is the default."""
    window = fields.optional_integer("sliding_window")
    return default if window is None and not fields.mentions("sliding_window") else window


def windows_by_type(fields: Fields, window: int | None) -> tuple[int | None, ...]:
    """Per layer the window, or None, as layer_types says; empty when there are none."""
    layer_types = fields.texts("layer_types")
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"layer type {min(unknown)} is not supported (full_attention, sliding_attention)")
    num_layers = fields.integer("num_hidden_layers")
    if layer_types and len(layer_types) != num_layers:
        raise fields.wrong("layer_types", f"a list of {num_layers} layer types")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def read_layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Sliding windows as Qwen checkpoints give them: switched on, then by layer_types or from max_window_layers on."""
    window = fields.optional_integer("sliding_window")
    if window is None or not fields.flag("use_sliding_window", False):
        return ()
    first = fields.integer("max_window_layers", 28)
    by_index = tuple(window if layer >= first else None for layer in range(fields.integer("num_hidden_layers")))
    return windows_by_type(fields, window) or by_index
