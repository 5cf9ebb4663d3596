"""Cohere's Command R (halves side by side, LayerNorm without bias) and Command R7B and A (windows)."""

from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, Norm, Norms, QKNorm, family
from weft.engine.models.families.names import LLAMA
from weft.engine.models.families.windows import read_window, windowless, windows_by_pattern


@family("CohereForCausalLM")
def cohere(fields: Fields) -> FamilySwitches:
    """Both halves share a norm; in Command R+ every head has a norm of its own."""
    head_norm = QKNorm(Norm.LAYER_NORM_WITHOUT_BIAS, per_head=True)
    return FamilySwitches(
        names=replace(LLAMA, feed_forward_norm=""),
        norm=Norm.LAYER_NORM_WITHOUT_BIAS,
        norms=Norms.PARALLEL,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=head_norm if fields.flag("use_qk_norm", False) else None,
        is_interleaved=True,
        logit_scale=fields.number("logit_scale", 0.0625),
        ties_embeddings=True,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    )


@family("Cohere2ForCausalLM")
def cohere2(fields: Fields) -> FamilySwitches:
    """Layers with full attention have no rotary embedding."""
    windows = windows_by_pattern(fields, read_window(fields, 4096), 4)
    return replace(
        cohere(fields),
        qk_norm=None,
        sliding_windows=windows,
        ropeless=windowless(windows),
        defaults={"rms_norm_eps": 1e-5},
    )
