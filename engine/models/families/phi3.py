"""Phi-3 and Phi-4: Llama's layers with stacked matrices, and LongRoPE for long contexts."""

from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, family
from weft.engine.models.families.names import LLAMA


@family("Phi3ForCausalLM")
def phi3(fields: Fields) -> FamilySwitches:
    """One window for all layers, if any."""
    return FamilySwitches(
        names=replace(LLAMA, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        sliding_windows=(fields.optional_integer("sliding_window"),) * fields.integer("num_hidden_layers"),
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    )
