"""MiniCPM3: latent attention, and multipliers of embeddings, of what layers add, and of logits."""

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, family
from weft.engine.models.families.latent import read_latent


@family("MiniCPM3ForCausalLM")
def minicpm3(fields: Fields) -> FamilySwitches:
    """A null multiplier changes nothing."""
    hidden_size, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    value_dim = hidden_size // fields.integer("num_attention_heads")
    sizes = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    latent = read_latent(fields, {**sizes, "v_head_dim": value_dim}, is_interleaved=False)
    depth, base = _multiplier(fields, "scale_depth", 1.4), _multiplier(fields, "dim_model_base", 256.0)
    return FamilySwitches(
        defaults={"rms_norm_eps": 1e-5},
        mixers=(latent,) * num_layers,
        head_dim=latent.rotary,
        mlp_bias=fields.flag("mlp_bias", False),
        embedding_scale=fields.number("scale_emb", 12.0),
        residual_scale=1.0 if depth is None else depth / num_layers**0.5,
        logit_scale=1.0 if base is None else base / hidden_size,
        ties_embeddings=True,
    )


def _multiplier(fields: Fields, name: str, default: float) -> float | None:
    return None if fields.mentions(name) and not fields.has(name) else fields.number(name, default)
