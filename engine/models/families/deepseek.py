"""DeepSeek V2 and V3, and families with V3's layers: latent attention, and experts behind a few dense layers.

Kimi K2 has the architecture of V3 by name. Published configurations may omit what transformers has a default for.
"""

from collections.abc import Callable, Mapping

from weft.engine.fields import Fields
from weft.engine.layers.routing import TopK
from weft.engine.models.families.experts import ExpertSwitches, corrected, on_layers
from weft.engine.models.families.family import FamilySwitches, UseModule, family
from weft.engine.models.families.latent import DEEPSEEK, read_latent

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
_GLM = {
    "n_routed_experts": 64,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
}
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
    """The first three layers are dense."""
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
    )
