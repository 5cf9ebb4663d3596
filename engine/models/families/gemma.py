"""Gemma (scaled embeddings, norm weights minus 1, tanh GELU), Gemma 2 (soft caps, post-norms), Gemma 3, VaultGemma.

Published configurations omit fields that have a default in transformers; the defaults here are the same.
"""

from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, Norms, QKNorm, family
from weft.engine.models.families.names import GEMMA2
from weft.engine.models.families.windows import read_window, windows_by_pattern, windows_where
from weft.engine.shared.errors import ModelError

_ACTIVATION = "gelu_pytorch_tanh"


@family("GemmaForCausalLM")
def gemma(fields: Fields) -> FamilySwitches:
    """The first releases say gelu but mean its approximation by tanh, as in transformers."""
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
    """By default layers 0, 2, 4, ... have a window; layer_types may say otherwise."""
    return replace(
        gemma(fields),
        names=GEMMA2,
        defaults={"num_key_value_heads": 4},
        norms=Norms.AROUND,
        sliding_windows=windows_where(fields, read_window(fields, 4096), lambda layer: layer % 2 == 0),
        attention_scale=_positive(fields, "query_pre_attn_scalar", 256.0) ** -0.5,
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
        qk_norm=QKNorm(offset=1.0),
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
    return None if fields.mentions(name) and not fields.has(name) else _positive(fields, name, default)


def _positive(fields: Fields, name: str, default: float | None) -> float:
    value = fields.number(name, default)
    if not value > 0:
        raise fields.wrong(name, "a number above 0")
    return value
