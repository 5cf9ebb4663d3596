"""Mistral: Llama's layers; in the first release all have the same sliding window."""

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, Temperature, family
from weft.engine.models.families.tuned_attention import AttentionSwitches
from weft.engine.models.families.windows import read_window, windows_where


@family("MistralForCausalLM")
def mistral(fields: Fields) -> FamilySwitches:
    """The default window is that of the first release."""
    windows = (read_window(fields, 4096),) * fields.integer("num_hidden_layers")
    return FamilySwitches(sliding_windows=windows, defaults={"num_key_value_heads": 8})


@family("MinistralForCausalLM")
def ministral(fields: Fields) -> FamilySwitches:
    """Layers may differ in their windows."""
    windows = windows_where(fields, read_window(fields, 4096), lambda layer: True)
    return FamilySwitches(sliding_windows=windows, defaults={"num_key_value_heads": 8})


@family("Ministral3ForCausalLM")
def ministral3(fields: Fields) -> FamilySwitches:
    """Scores grow with the position of the query, behind the original context."""
    rope = fields.with_defaults({"rope_parameters": _MINISTRAL3_ROPE}).section("rope_parameters")
    num_layers = fields.integer("num_hidden_layers")
    return FamilySwitches(
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_parameters": _MINISTRAL3_ROPE},
        sliding_windows=(fields.optional_integer("sliding_window"),) * num_layers,
        temperature=Temperature(
            rope.number("llama_4_scaling_beta"), rope.size("original_max_position_embeddings"), offset=0
        ),
        mixers=tuple(AttentionSwitches(layer, is_tuned=True) for layer in range(num_layers)),
        head_dim=128,
    )


_MINISTRAL3_ROPE = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
