"""Hunyuan: QK-norm behind the rotary embedding."""

from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.layers.routing import TopK
from weft.engine.models.families.experts import ExpertNames, ExpertSwitches
from weft.engine.models.families.family import FamilySwitches, QKNorm, family
from weft.engine.models.families.llama import llama
from weft.engine.models.families.names import LLAMA

EXPERTS = ExpertNames(
    router="mlp.gate.wg",
    shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_down="mlp.shared_mlp.down_proj",
)


@family("HunYuanDenseV1ForCausalLM")
def hunyuan_v1_dense(fields: Fields) -> FamilySwitches:
    """Llama's layers otherwise."""
    names = replace(LLAMA, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
    return replace(
        llama(fields), names=names, mlp_bias=False, qk_norm=QKNorm(is_last=True), defaults={"rms_norm_eps": 1e-5}
    )


@family("HunYuanMoEV1ForCausalLM")
def hunyuan_v1_moe(fields: Fields) -> FamilySwitches:
    """The same with experts, of which each layer may have and choose another number, and one for all tokens."""
    size, num_layers = fields.integer("intermediate_size"), fields.integer("num_hidden_layers")
    counts, chosen = (
        values * num_layers if len(values) == 1 else values
        for values in (fields.integers("num_experts") or (1,), fields.integers("moe_topk") or (1,))
    )
    experts = tuple(
        ExpertSwitches(count, size, TopK(best, divides=True), EXPERTS, shared_size=size)
        for count, best in zip(counts, chosen, strict=True)
    )
    return replace(hunyuan_v1_dense(fields), feed_forwards=experts)
