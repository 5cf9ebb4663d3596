"""The switches of latent attention, which families with DeepSeek's names of fields and tensors share."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.engine.fields import Fields
from weft.engine.models.families.family import MixerSwitches, UseModule

if TYPE_CHECKING:
    from weft.engine.describe.specs import MixerSpec, NormSpec
    from weft.engine.models.config import ModelConfig


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

    def spec(self, config: "ModelConfig", layer: str, output_norm: "NormSpec | None") -> "MixerSpec":
        """See `MixerSwitches`."""
        from weft.engine.models.latent_attention import latent_attention_spec

        return latent_attention_spec(self, config, f"{layer}.{self.prefix}", output_norm)


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
