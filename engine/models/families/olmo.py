"""OLMo (norms without weights), OLMo 2 (norms behind each half, QK-norm over all heads), OLMo 3 (windows)."""

from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, Norm, Norms, QKNorm, family
from weft.engine.models.families.windows import read_window, windows_by_pattern


@family("OlmoForCausalLM")
def olmo(fields: Fields) -> FamilySwitches:
    """Queries, keys and values may be clipped."""
    return FamilySwitches(
        norm=Norm.PLAIN_LAYER_NORM,
        qkv_bias=fields.flag("attention_bias", False),
        clip=fields.optional_number("clip_qkv"),
        defaults={"rms_norm_eps": 1e-5},
    )


@family("Olmo2ForCausalLM")
def olmo2(fields: Fields) -> FamilySwitches:
    """No norm before a half."""
    return replace(olmo(fields), norm=Norm.RMS, norms=Norms.AFTER, qk_norm=QKNorm(over_all=True), clip=None)


@family("Olmo3ForCausalLM")
def olmo3(fields: Fields) -> FamilySwitches:
    """Three of four layers have a window, and only the others scale the rotary embedding."""
    theta = fields.number("rope_theta", 5e5)
    return replace(
        olmo2(fields),
        sliding_windows=windows_by_pattern(fields, read_window(fields, 4096), 4),
        local_rope_theta=theta,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": theta},
    )
