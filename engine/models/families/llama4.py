"""Llama 4: attention to chunks, temperatures in layers without rotary embedding, and experts of scaled inputs."""

from weft.engine.fields import Fields
from weft.engine.layers.routing import TopK
from weft.engine.models.families.experts import ExpertNames, ExpertSwitches, on_layers
from weft.engine.models.families.family import FamilySwitches, Norm, QKNorm, Temperature, family
from weft.engine.models.families.linear_attention import SizedFeedForward, read_layer_types
from weft.engine.models.families.llama import read_ropeless
from weft.engine.models.families.names import TensorNames
from weft.engine.models.families.tuned_attention import AttentionSwitches

_NAMES = TensorNames(gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj")
_EXPERTS = ExpertNames(
    router="feed_forward.router",
    gate_up=("feed_forward.experts.gate_up_proj",),
    down="feed_forward.experts.down_proj",
    suffixes=("", ""),
    shared_gate_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    shared_down="feed_forward.shared_expert.down_proj",
)
_CHUNKED, _FULL = "chunked_attention", "full_attention"


@family("Llama4ForCausalLM")
def llama4(fields: Fields) -> FamilySwitches:
    """By default layers with a rotary embedding see chunks; the size of dense layers is not that of experts."""
    ropeless, bias = read_ropeless(fields), fields.flag("attention_bias", False)
    layers = range(fields.integer("num_hidden_layers"))
    by_index = tuple(_FULL if layer in ropeless else _CHUNKED for layer in layers)
    kinds = read_layer_types(fields, by_index, (_CHUNKED, _FULL))
    span = fields.size("attention_chunk_size", 8192)
    is_tuned = fields.raw("attn_temperature_tuning") not in (False, 0)  # 4 in the first files
    mixers = tuple(
        AttentionSwitches(
            layer, span if kinds[layer] == _CHUNKED else None, is_tuned and layer in ropeless, layer not in ropeless
        )
        for layer in layers
    )
    return FamilySwitches(
        names=_NAMES,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_key_value_heads": 8},
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKNorm(Norm.PLAIN_RMS, is_last=True) if fields.flag("use_qk_norm", True) else None,
        is_interleaved=True,
        ropeless=ropeless,
        temperature=Temperature(fields.number("attn_scale", 0.1), fields.size("floor_scale", 8192), offset=1),
        mixers=mixers,
        feed_forwards=_feed_forwards(fields),
        head_dim=128,
    )


def _feed_forwards(fields: Fields) -> tuple[ExpertSwitches | SizedFeedForward, ...]:
    size = fields.integer("intermediate_size")
    experts = ExpertSwitches(
        num_experts=fields.integer("num_local_experts", 16),
        size=size,
        routing=TopK(fields.integer("num_experts_per_tok", 1), scores=None, shares="sigmoid"),
        names=_EXPERTS,
        scales_inputs=True,
        shared_size=size,
        is_transposed=True,
    )
    step = fields.size("interleave_moe_layer_step", 1)
    sparse = fields.integers("moe_layers")
    has_experts = (
        (lambda layer: layer in sparse) if fields.has("moe_layers") else (lambda layer: not (layer + 1) % step)
    )
    dense = SizedFeedForward(fields.size("intermediate_size_mlp", 16_384))
    return tuple(layer or dense for layer in on_layers(fields, experts, has_experts))
