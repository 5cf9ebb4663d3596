"""RecurrentGemma: Griffin's recurrence, and attention with a window in every third layer."""

import math

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, family
from weft.engine.models.families.linear_attention import GatedRecurrenceSwitches, SizedFeedForward
from weft.engine.models.families.names import TensorNames

_NAMES = TensorNames(
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
    """The kinds of layers repeat."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    kinds = fields.texts("block_types") or ("recurrent", "recurrent", "attention")
    if not set(kinds) <= {"recurrent", "attention"}:
        raise fields.wrong("block_types", "a list of recurrent and attention")
    window = fields.integer("attention_window_size", 2048)
    recurrence = GatedRecurrenceSwitches(fields.integer("lru_width", hidden), fields.integer("conv1d_width", 4))
    is_recurrent = [kinds[layer % len(kinds)] == "recurrent" for layer in range(num_layers)]
    fraction, exponent = math.frexp(hidden**0.5)
    return FamilySwitches(
        names=_NAMES,
        defaults={"partial_rotary_factor": 0.5, "max_position_embeddings": 8192},
        qkv_bias=fields.flag("attention_bias", False),
        o_bias=True,
        mlp_bias=True,
        sliding_windows=(window,) * num_layers,
        mixers=tuple(recurrence if is_so else None for is_so in is_recurrent),
        feed_forwards=(SizedFeedForward(fields.integer("intermediate_size") // 2),) * num_layers,
        norm_offset=1.0,
        embedding_scale=math.ldexp(round(fraction * 256), exponent - 8),  # bfloat16, whatever the model's dtype
        logit_soft_cap=fields.number("logits_soft_cap", 30.0),
        activation=fields.optional_text("hidden_activation") or "gelu_pytorch_tanh",
        ties_embeddings=True,
    )
