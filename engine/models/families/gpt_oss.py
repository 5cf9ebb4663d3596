"""gpt-oss: attention sinks, windows in every second layer, and experts with biases and limits."""

from weft.engine.fields import Fields
from weft.engine.layers.routing import Gating, TopK
from weft.engine.models.families.experts import ExpertNames, ExpertSwitches, on_layers
from weft.engine.models.families.family import FamilySwitches, family
from weft.engine.models.families.windows import read_window, windows_where


@family("GptOssForCausalLM")
def gpt_oss(fields: Fields) -> FamilySwitches:
    """The checkpoint has all experts in one tensor, as (inputs, outputs), with gate and up in turn; GGUF has not."""
    are_separate = fields.flag("has_separate_experts", False)
    limit, slope = fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", 1.702)
    names = ExpertNames("mlp.router", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj", ("", "_bias"))
    experts = ExpertSwitches(
        num_experts=fields.integer("num_local_experts", 128),
        size=fields.integer("intermediate_size", 2880),
        routing=TopK(fields.integer("num_experts_per_tok", 4), scores=None, shares="softmax"),
        names=ExpertNames(router="mlp.router") if are_separate else names,
        gating=Gating(limit=limit, slope=slope, up_offset=1.0),
        router_bias=True,
        expert_bias=True,
        is_transposed=not are_separate,
        is_interleaved=not are_separate,
    )
    return FamilySwitches(
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "num_key_value_heads": 8,
            "rope_parameters": _ROPE,
        },
        qkv_bias=fields.flag("attention_bias", True),
        sinks="self_attn.sinks",
        sliding_windows=windows_where(fields, read_window(fields, 128), lambda layer: layer % 2 == 0),
        head_dim=64,
        feed_forwards=on_layers(fields, experts),
    )


_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
