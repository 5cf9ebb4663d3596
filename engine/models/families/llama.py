"""Llama 2, 3 and 3.x, other models with the same architecture name, and families with small differences."""

from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.models.families.exaone import exaone
from weft.engine.models.families.family import FamilySwitches, Norm, family
from weft.engine.models.families.names import LLAMA
from weft.engine.models.families.windows import read_window, windows_where


@family("LlamaForCausalLM")
def llama(fields: Fields) -> FamilySwitches:
    """Biases only where config.json asks for them."""
    if fields.optional_text("model_type") == "exaone":
        return exaone(fields)
    is_other = fields.optional_text("model_type") in ("internlm3", "iquestcoder")  # under the same architecture
    return FamilySwitches(
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        defaults=_EPS_5 if is_other else {},
    )


@family("ArceeForCausalLM")
def arcee(fields: Fields) -> FamilySwitches:
    """Feed-forward layers without a gate."""
    names = replace(LLAMA, gate_up=("mlp.up_proj",))
    return replace(llama(fields), names=names, is_gated=False, defaults=_SQUARED)


@family("CwmForCausalLM")
def cwm(fields: Fields) -> FamilySwitches:
    """Windows in three of four layers."""
    return FamilySwitches(
        mlp_bias=fields.flag("mlp_bias", False),
        sliding_windows=windows_where(fields, read_window(fields, 8192), lambda layer: layer % 4 > 0),
        head_dim=128,
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_parameters": _CWM_ROPE},
    )


@family("Ernie4_5ForCausalLM")
def ernie4_5(fields: Fields) -> FamilySwitches:
    """ERNIE 4.5, dense: neighbours are rotated."""
    has_bias = fields.flag("use_bias", False)
    return FamilySwitches(
        qkv_bias=has_bias,
        mlp_bias=has_bias,
        is_interleaved=True,
        head_dim=128,
        ties_embeddings=True,
        defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    )


@family("HeliumForCausalLM")
def helium(fields: Fields) -> FamilySwitches:
    """Neighbours are rotated; the output of attention has no bias."""
    return replace(
        llama(fields),
        o_bias=False,
        is_interleaved=True,
        head_dim=128,
        defaults={"rms_norm_eps": 1e-8, "rope_theta": 1e5},
    )


@family("Jais2ForCausalLM")
def jais2(fields: Fields) -> FamilySwitches:
    """LayerNorm, and feed-forward layers without a gate."""
    return FamilySwitches(
        names=replace(LLAMA, gate_up=("mlp.up_proj",)),
        norm=Norm.LAYER_NORM,
        qkv_bias=fields.flag("attention_bias", True),
        mlp_bias=fields.flag("mlp_bias", True),
        is_gated=False,
        defaults=_SQUARED,
    )


@family("SeedOssForCausalLM")
def seed_oss(fields: Fields) -> FamilySwitches:
    """Biases of queries, keys and values are on unless config.json says otherwise."""
    return FamilySwitches(
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        head_dim=128,
        defaults={"num_key_value_heads": 8},
    )


@family("SmolLM3ForCausalLM")
def smollm3(fields: Fields) -> FamilySwitches:
    """Some layers have no rotary embedding."""
    ropeless = read_ropeless(fields)
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    return replace(
        llama(fields),
        ropeless=ropeless,
        sliding_windows=windows_where(fields, window, lambda layer: layer in ropeless),
        ties_embeddings=True,
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6},
    )


def read_ropeless(fields: Fields) -> frozenset[int]:
    """Layers without a rotary embedding: no_rope_layers holds 1 for those that have it; by default every fourth."""
    num_layers = fields.integer("num_hidden_layers")
    interval = fields.size("no_rope_layer_interval", 4)
    has_rope = fields.integers("no_rope_layers") or tuple((layer + 1) % interval for layer in range(num_layers))
    if len(has_rope) != num_layers:
        raise fields.wrong("no_rope_layers", f"a list of {num_layers} numbers")
    return frozenset(layer for layer, layer_has_rope in enumerate(has_rope) if not layer_has_rope)


_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_EPS_5 = {"rms_norm_eps": 1e-5}
_SQUARED = {"rms_norm_eps": 1e-5, "hidden_act": "relu2"}
