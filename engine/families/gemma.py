"""The families of Gemma: Gemma 1 to 4, VaultGemma, and RecurrentGemma.

Published configurations omit fields that have a default in transformers; the defaults here are the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from weft.engine.families import switches
from weft.engine.families.attention import (
    GatedRecurrenceSwitches,
    read_window,
    windowless,
    windows_by_pattern,
    windows_where,
)
from weft.engine.families.experts import ExpertNames, ExpertSwitches, TopK
from weft.engine.families.switches import FamilySwitches, FeedForwardSwitches, Norms, TensorNames, family
from weft.engine.fields import Fields
from weft.engine.wire.errors import ModelError

_ACTIVATION = "gelu_pytorch_tanh"


@family("GemmaForCausalLM")
def gemma(fields: Fields) -> FamilySwitches:
    """Scaled embeddings, norm weights minus 1, tanh GELU.

    The first releases say gelu but mean its approximation by tanh, as in transformers.
    """
    if fields.flag("use_bidirectional_attention", False):
        raise ModelError("use_bidirectional_attention is not supported (every token sees itself and those before it)")
    activation = fields.optional_text("hidden_act") or _ACTIVATION
    return FamilySwitches(
        qkv_bias=fields.flag("attention_bias", False),
        head_dim=256,
        norm_offset=1.0,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        activation=_ACTIVATION if activation == "gelu" else activation,
        ties_embeddings=True,
    )


@family("Gemma2ForCausalLM")
def gemma2(fields: Fields) -> FamilySwitches:
    """Soft caps, post-norms. By default layers 0, 2, 4, ... have a window; layer_types may say otherwise."""
    return replace(
        gemma(fields),
        names=switches.GEMMA2,
        defaults={"num_key_value_heads": 4},
        norms=Norms.AROUND,
        sliding_windows=windows_where(fields, read_window(fields, 4096), lambda layer: layer % 2 == 0),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", 30.0),
        activation=fields.optional_text("hidden_activation") or fields.optional_text("hidden_act") or _ACTIVATION,
    )


@family("Gemma3ForCausalLM")
def gemma3(fields: Fields) -> FamilySwitches:
    """QK-norm; five of six layers have a window, and a rotary embedding with another base that is not scaled."""
    return replace(
        gemma2(fields),
        sliding_windows=windows_by_pattern(fields, read_window(fields, 4096), 6),
        qk_norm=switches.QKNorm(offset=1.0),
        mutual=frozenset(range(fields.integer("num_hidden_layers"))),
        local_rope_theta=fields.number("rope_local_base_freq", 1e4),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", None),
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", None),
        defaults={"num_key_value_heads": 4, "rope_theta": 1e6, "max_position_embeddings": 131_072},
    )


@family("VaultGemmaForCausalLM")
def vaultgemma(fields: Fields) -> FamilySwitches:
    """Gemma 2 with norms before each half alone."""
    return replace(gemma2(fields), norms=Norms.BEFORE)


def _soft_cap(fields: Fields, name: str, default: float | None) -> float | None:
    """A soft cap: null means none, an absent field means the default."""
    if default is None and not fields.has(name):
        return None
    return None if fields.mentions(name) and not fields.has(name) else fields.number(name, default)


_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}

_GEMMA4_EXPERTS = ExpertNames("router.proj", ("experts.gate_up_proj",), "experts.down_proj", ("", ""))


@dataclass(frozen=True, slots=True)
class Gemma4Attention(switches.MixerSwitches):
    """Attention of a layer.

    Attributes:
        index: Of the layer.
        has_keys_as_values: Whether values are made by the matrix of keys.
        source: The layer whose keys and values it reads; None if it has some of its own.
        is_read: Whether later layers read those.
    """

    index: int
    head_dim: int
    num_kv_heads: int
    has_keys_as_values: bool
    source: int | None
    is_read: bool


@dataclass(frozen=True, slots=True)
class Gemma4Experts(FeedForwardSwitches):
    """A dense layer of this size with experts beside it."""

    experts: ExpertSwitches
    dense_size: int

    @override
    def num_values(self, hidden_size: int) -> int:
        return self.experts.num_values(hidden_size) + self.dense_size


@dataclass(frozen=True, slots=True)
class Gemma4Layers(switches.DecoderSwitches):
    """What a decoder has beside its blocks.

    Attributes:
        input_size: Values of a token's input for each layer; 0 for none.
        vocab_size: Tokens that have such inputs.
    """

    input_size: int
    vocab_size: int

    @override
    def num_values(self, num_layers: int) -> int:
        return num_layers * self.input_size


@family("Gemma4ForCausalLM")
def gemma4(fields: Fields) -> FamilySwitches:
    """Layers that share keys and values, heads of two sizes, inputs of layers, experts beside dense layers.

    The last layer has no window; the last num_kv_shared_layers read what earlier ones of their kind keep.
    """
    if fields.optional_text("use_bidirectional_attention") == "all":
        raise switches.UseModule("use_bidirectional_attention: all is not computed by Weft's blocks")
    num_layers, attention_bias = fields.integer("num_hidden_layers"), fields.flag("attention_bias", False)
    windows = (*windows_by_pattern(fields, read_window(fields, 512), 6)[:-1], None)
    first_shared = num_layers - fields.integer("num_kv_shared_layers", 0)
    sources = _sources(windows, first_shared)
    mixers = tuple(_attention(fields, windows, sources, layer) for layer in range(num_layers))
    sees_both_ways = fields.optional_text("use_bidirectional_attention") == "vision"
    kept = ("k_proj", "v_proj", "k_norm")  # which checkpoints may hold where nothing reads them
    return FamilySwitches(
        names=switches.GEMMA2,
        defaults={"num_key_value_heads": 4, "rope_parameters": _GEMMA4_ROPE},
        norms=Norms.AROUND,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=switches.QKNorm(),
        unused=tuple(f"model.layers.{n}.self_attn.{name}." for n in range(first_shared, num_layers) for name in kept),
        sliding_windows=windows,
        mutual=frozenset(range(num_layers)) - windowless(windows) if sees_both_ways else frozenset(),
        full_head_dim=next(mixer.head_dim for mixer, window in zip(mixers, windows, strict=True) if window is None),
        mixers=mixers,
        feed_forwards=tuple(_feed_forward(fields, layer >= first_shared) for layer in range(num_layers)),
        head_dim=256,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        attention_scale=1.0,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
        activation=fields.optional_text("hidden_activation") or _ACTIVATION,
        ties_embeddings=True,
        extension=Gemma4Layers(
            fields.integer("hidden_size_per_layer_input", 256), fields.integer("vocab_size_per_layer_input", 262_144)
        ),
    )


@family("Gemma4UnifiedForCausalLM")
def gemma4_unified(fields: Fields) -> FamilySwitches:
    """Gemma 4 without inputs of layers and experts."""
    own = {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "use_bidirectional_attention": "vision"}
    return gemma4(fields.with_defaults(own))


def _sources(windows: Sequence[int | None], first_shared: int) -> tuple[int | None, ...]:
    """For each layer the last one of its kind that keeps keys and values; None for a layer that keeps its own."""
    last = {window: layer for layer, window in enumerate(windows[:first_shared])}
    if set(windows) - set(last):
        raise switches.UseModule("num_kv_shared_layers leaves no layer of a kind that keeps keys and values")
    return tuple(last[window] if layer >= first_shared else None for layer, window in enumerate(windows))


def _feed_forward(fields: Fields, is_shared: bool) -> FeedForwardSwitches | None:
    is_wide, size = is_shared and fields.flag("use_double_wide_mlp", False), fields.integer("intermediate_size")
    size = 2 * size if is_wide else size
    if not fields.flag("enable_moe_block", False):
        return switches.SizedFeedForward(size) if is_wide else None
    experts = ExpertSwitches(
        num_experts=fields.size("num_experts"),
        size=fields.size("moe_intermediate_size"),
        routing=TopK(fields.size("top_k_experts"), divides=True),
        names=_GEMMA4_EXPERTS,
    )
    return Gemma4Experts(experts, size)


def _attention(
    fields: Fields, windows: Sequence[int | None], sources: Sequence[int | None], layer: int
) -> Gemma4Attention:
    head_dim, num_kv_heads = fields.size("head_dim", 256), fields.size("num_key_value_heads", 4)
    is_full = windows[layer] is None
    has_keys_as_values = is_full and fields.flag("attention_k_eq_v", False)
    if fields.mentions("per_layer_config"):
        layers = fields.section("per_layer_config")
        (own,) = [layers.section(name) for name in layers.names() if int(name) == layer] or [layers.section("")]
        head_dim, num_kv_heads = own.size("head_dim", head_dim), own.size("num_key_value_heads", num_kv_heads)
    elif is_full:
        head_dim = fields.size("global_head_dim", 512)
        if has_keys_as_values:
            num_kv_heads = fields.size("num_global_key_value_heads", num_kv_heads)
    return Gemma4Attention(layer, head_dim, num_kv_heads, has_keys_as_values, sources[layer], layer in sources)


_RECURRENT_GEMMA = TensorNames(
    norm="model.final_norm",
    mixer_norm="temporal_pre_norm",
    feed_forward_norm="channel_pre_norm",
    qkv=("temporal_block.q_proj", "temporal_block.k_proj", "temporal_block.v_proj"),
    output="temporal_block.o_proj",
    gate_up=("mlp_block.gate_proj", "mlp_block.up_proj"),
    down="mlp_block.down_proj",
)


@family("RecurrentGemmaForCausalLM")
def recurrent_gemma(fields: Fields) -> FamilySwitches:
    """Griffin's recurrence, and attention with a window in every third layer. The kinds of layers repeat."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    kinds = fields.texts("block_types") or ("recurrent", "recurrent", "attention")
    if not set(kinds) <= {"recurrent", "attention"}:
        raise fields.wrong("block_types", "a list of recurrent and attention")
    window = fields.integer("attention_window_size", 2048)
    recurrence = GatedRecurrenceSwitches(fields.integer("lru_width", hidden), fields.integer("conv1d_width", 4))
    is_recurrent = [kinds[layer % len(kinds)] == "recurrent" for layer in range(num_layers)]
    fraction, exponent = math.frexp(hidden**0.5)
    return FamilySwitches(
        names=_RECURRENT_GEMMA,
        defaults={"partial_rotary_factor": 0.5, "max_position_embeddings": 8192},
        qkv_bias=fields.flag("attention_bias", False),
        o_bias=True,
        mlp_bias=True,
        sliding_windows=(window,) * num_layers,
        mixers=tuple(recurrence if is_so else None for is_so in is_recurrent),
        feed_forwards=(switches.SizedFeedForward(fields.integer("intermediate_size") // 2),) * num_layers,
        norm_offset=1.0,
        embedding_scale=math.ldexp(round(fraction * 256), exponent - 8),  # bfloat16, whatever the model's dtype
        logit_soft_cap=fields.number("logits_soft_cap", 30.0),
        activation=fields.optional_text("hidden_activation") or _ACTIVATION,
        ties_embeddings=True,
    )
