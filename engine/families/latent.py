"""Families with latent attention under DeepSeek's names of fields and tensors, and the switches that they share.

DeepSeek V2 and V3 (with Kimi K2 and Sarvam) and GLM 4.7 Flash have experts behind a few dense layers. MiniCPM3 and
Youtu are dense. Published configurations may omit what transformers has a default for.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.engine.families.experts import ExpertSwitches, TopK, corrected, on_layers
from weft.engine.families.switches import FamilySwitches, MixerSwitches, UseModule, family
from weft.engine.fields import Fields


@dataclass(frozen=True, slots=True)
class LatentSwitches(MixerSwitches):
    """Latent attention; the sizes are those of `LatentSizes`.

    Attributes:
        scale: Factor on the scores.
        norm_eps: Of the norms of latents, whatever rms_norm_eps is.
        has_bias: Whether the projections of hidden states and the output projection have a bias.
        is_interleaved: Whether the rotary embedding turns pairs of neighbours.
        has_rope: Whether the rotary part of queries and keys is rotated at all.
        prefix: Name of the attention behind that of the layer.
    """

    plain: int
    rotary: int
    latent: int
    value: int
    query_latent: int | None
    scale: float
    norm_eps: float = 1e-6
    has_bias: bool = False
    is_interleaved: bool = True
    has_rope: bool = True
    prefix: str = "self_attn"


DEEPSEEK: Mapping[str, int] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""What DeepSeek's configurations may leave out."""


def read_latent(
    fields: Fields, defaults: Mapping[str, int] = DEEPSEEK, *, is_interleaved: bool | None = None
) -> LatentSwitches:
    """The latent attention that config.json asks for; is_interleaved None reads that, too.

    Raises:
        UseModule: Only some of the stacked projections have a bias, or the rotary embedding has another size.
    """
    query_latent = fields.optional_integer("q_lora_rank")
    if not fields.mentions("q_lora_rank"):
        query_latent = defaults.get("q_lora_rank")
    plain, rotary, latent, value = (
        fields.integer(name, defaults[name])
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim")
    )
    has_bias = fields.flag("attention_bias", False)
    if has_bias and query_latent is None:
        raise UseModule("attention_bias without q_lora_rank is not supported by Weft's latent attention")
    if fields.integer("head_dim", rotary) != rotary:
        raise UseModule(f"head_dim must be qk_rope_head_dim, {rotary}, for Weft's latent attention")
    return LatentSwitches(
        plain=plain,
        rotary=rotary,
        latent=latent,
        value=value,
        query_latent=query_latent,
        scale=(plain + rotary) ** -0.5 * _yarn_scale(fields),
        has_bias=has_bias,
        is_interleaved=fields.flag("rope_interleave", True) if is_interleaved is None else is_interleaved,
    )


def _yarn_scale(fields: Fields) -> float:
    """What a longer context multiplies scores with, besides the attention factor of YaRN itself."""
    section = fields.section("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    kind = section.optional_text("rope_type") or section.optional_text("type") or "default"
    mscale = section.number("mscale_all_dim", 0.0)
    if kind == "default" or not mscale:
        return 1.0
    factor = section.number("factor")
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


_V2 = {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
_V3 = {
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
_SARVAM = {**_V3, "n_routed_experts": 128, "n_group": 1, "topk_group": 1}
_SARVAM_LATENT = {name: size for name, size in DEEPSEEK.items() if name != "q_lora_rank"}
_GLM = {"n_routed_experts": 64, "moe_intermediate_size": 1536, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8}
_GLM_LATENT = {**DEEPSEEK, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}


@family("DeepseekV2ForCausalLM")
def deepseek_v2(fields: Fields) -> FamilySwitches:
    """Softmax scores; shares are not divided by their sum, whatever norm_topk_prob says, as in transformers."""
    fields = fields.with_defaults(_V2)
    method, num_groups, num_best = fields.optional_text("topk_method") or "greedy", 1, 1
    if method == "group_limited_greedy":
        num_groups, num_best = fields.integer("n_group"), fields.integer("topk_group")
    elif method != "greedy":
        raise UseModule(f"topk_method {method} is not supported by Weft's experts")
    size = fields.integer("moe_intermediate_size")
    experts = ExpertSwitches(
        num_experts=fields.integer("n_routed_experts"),
        size=size,
        routing=TopK(
            fields.integer("num_experts_per_tok"),
            num_groups=num_groups,
            num_best_groups=num_best,
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
        shared_size=fields.integer("n_shared_experts") * size,
        shared_bias=fields.flag("mlp_bias", False),
    )
    num_dense = fields.integer("first_k_dense_replace", 0)
    return _switches(fields, experts, lambda layer: layer >= num_dense, is_interleaved=True)


@family("DeepseekV3ForCausalLM")
def deepseek_v3(fields: Fields) -> FamilySwitches:
    """The first three layers are dense. Kimi K2 has this architecture by name."""
    if fields.optional_text("model_type") == "sarvam_mla":  # which transformers saves under this architecture
        num_dense = fields.integer("first_k_dense_replace", 1)
        return _switches(fields, _corrected(fields, _SARVAM), lambda layer: layer >= num_dense, _SARVAM_LATENT)
    num_dense = fields.integer("first_k_dense_replace", 3)
    return _switches(fields, _corrected(fields, _V3), lambda layer: layer >= num_dense)


@family("Glm4MoeLiteForCausalLM")
def glm4_moe_lite(fields: Fields) -> FamilySwitches:
    """GLM 4.7 Flash: the first layer is dense."""
    experts = _corrected(fields, _GLM)
    return _switches(fields, experts, _by_type(fields, lambda layer: layer > 0), _GLM_LATENT, rms_norm_eps=1e-5)


def _by_type(fields: Fields, has_experts: Callable[[int], bool]) -> Callable[[int], bool]:
    """Which layers have experts, by mlp_layer_types if that is there."""
    kinds = fields.texts("mlp_layer_types")
    return (lambda layer: kinds[layer] == "sparse") if kinds else has_experts


def _corrected(fields: Fields, defaults: Mapping[str, float]) -> ExpertSwitches:
    fields = fields.with_defaults(defaults)
    return corrected(fields, fields.integer("n_routed_experts"))


def _switches(
    fields: Fields,
    experts: ExpertSwitches,
    has_experts: Callable[[int], bool],
    latent_defaults: Mapping[str, int] = DEEPSEEK,
    *,
    is_interleaved: bool | None = None,
    rms_norm_eps: float = 1e-6,
) -> FamilySwitches:
    latent = read_latent(fields, latent_defaults, is_interleaved=is_interleaved)
    return FamilySwitches(
        defaults={"rms_norm_eps": rms_norm_eps},
        mixers=(latent,) * fields.integer("num_hidden_layers"),
        feed_forwards=on_layers(fields, experts, has_experts),
        head_dim=latent.rotary,
        mlp_bias=fields.flag("mlp_bias", False) if is_interleaved else False,
        has_draft_heads=True,
    )


@family("MiniCPM3ForCausalLM")
def minicpm3(fields: Fields) -> FamilySwitches:
    """Multipliers of embeddings, of what layers add, and of logits. A null multiplier changes nothing."""
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


@family("YoutuForCausalLM")
def youtu(fields: Fields) -> FamilySwitches:
    """A dense model. The rotary embedding is that of the rotary part of heads."""
    latent = read_latent(fields)
    num_layers = fields.integer("num_hidden_layers")
    return FamilySwitches(mixers=(latent,) * num_layers, head_dim=latent.rotary, ties_embeddings=True)
