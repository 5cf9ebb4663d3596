"""Hunyuan, dense: QK-norm behind the rotary embedding."""

from dataclasses import replace

from weft.engine.models.families.family import FamilySwitches, QKNorm
from weft.engine.models.families.fields import Fields
from weft.engine.models.families.llama import llama
from weft.engine.models.families.names import LLAMA


def hunyuan_v1_dense(fields: Fields) -> FamilySwitches:
    """Llama's layers otherwise."""
    names = replace(LLAMA, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
    return replace(
        llama(fields), names=names, mlp_bias=False, qk_norm=QKNorm(is_last=True), defaults={"rms_norm_eps": 1e-5}
    )
