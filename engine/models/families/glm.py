"""GLM-4 (half of each head is rotated, in neighbours) and GLM-4-0414 (norms on both sides of both halves)."""

from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, Norms, family
from weft.engine.models.families.names import LLAMA

_NAMES = replace(LLAMA, gate_up=("mlp.gate_up_proj",))


@family("GlmForCausalLM")
def glm(fields: Fields) -> FamilySwitches:
    """Gate and up projection are one matrix."""
    return FamilySwitches(
        names=_NAMES,
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=False,
        is_interleaved=True,
        head_dim=128,
        defaults={"num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7},
    )


@family("Glm4ForCausalLM")
def glm4(fields: Fields) -> FamilySwitches:
    """As before, with further norms."""
    names = replace(_NAMES, mixer_post_norm="post_self_attn_layernorm", feed_forward_post_norm="post_mlp_layernorm")
    return replace(glm(fields), names=names, norms=Norms.AROUND)
