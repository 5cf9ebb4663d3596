"""EXAONE 3, which is Llama under other names, and 4."""

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, Norms, QKNorm, family
from weft.engine.models.families.names import TensorNames
from weft.engine.models.families.windows import read_window, windowless, windows_by_pattern

_NAMES = TensorNames(
    embedding="transformer.wte",
    layers="transformer.h",
    norm="transformer.ln_f",
    mixer_norm="ln_1",
    feed_forward_norm="ln_2",
    qkv=tuple(f"attn.attention.{part}_proj" for part in "qkv"),
    output="attn.attention.out_proj",
    gate_up=("mlp.c_fc_0", "mlp.c_fc_1"),
    down="mlp.c_proj",
)


@family("ExaoneForCausalLM")
def exaone(fields: Fields) -> FamilySwitches:
    """EXAONE 3 and 3.5. What transformers saves has Llama's architecture and these names."""
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_key_value_heads": 8}
    return FamilySwitches(names=_NAMES, qkv_bias=bias, mlp_bias=mlp_bias, defaults=defaults)


@family("Exaone4ForCausalLM")
def exaone4(fields: Fields) -> FamilySwitches:
    """Norms behind each half, QK-norm; layers with full attention know no positions if others have a window."""
    window = read_window(fields, 4096)
    windows = windows_by_pattern(fields, window, 4) if window is not None else ()
    return FamilySwitches(
        norms=Norms.AFTER,
        qk_norm=QKNorm(),
        sliding_windows=windows,
        ropeless=windowless(windows),
        defaults={"rms_norm_eps": 1e-5},
    )
