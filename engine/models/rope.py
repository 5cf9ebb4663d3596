"""Reads the rotary embedding of a checkpoint.

In the dialect of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters). Refuses by name what the rotary
layer does not compute.
"""

import math

from weft.engine.layers.rotary import LinearScaling, Llama3Scaling, RopeConfig, RopeScaling, YarnScaling
from weft.engine.models.families.fields import Fields
from weft.engine.shared.errors import ModelError

_DEFAULT_THETA = 10_000.0
_SUPPORTED = "default, linear, llama3, yarn"


def read_rope(fields: Fields, max_position_embeddings: int) -> RopeConfig:
    """The rotary embedding that config.json asks for; raises ModelError for a type that is not supported."""
    section = fields.section("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    partial = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor {partial} is not supported (rotary embedding of a part of each head)")
    theta = section.number("rope_theta", fields.number("rope_theta", _DEFAULT_THETA))
    if {"full_attention", "sliding_attention"} & set(section.names()):
        raise ModelError("rope_parameters that differ between layer types are not supported")
    rope_type = section.optional_text("rope_type") or section.optional_text("type") or "default"
    original = fields.integer("original_max_position_embeddings", max_position_embeddings)
    return RopeConfig(theta, _read_scaling(rope_type, section, original, max_position_embeddings))


def _read_scaling(rope_type: str, section: Fields, original: int, longest: int) -> RopeScaling | None:
    original = section.integer("original_max_position_embeddings", original)
    match rope_type:
        case "default":
            return None
        case "linear":
            return LinearScaling(section.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=section.number("factor"),
                low_freq_factor=section.number("low_freq_factor"),
                high_freq_factor=section.number("high_freq_factor"),
                original_max_position_embeddings=original,
            )
        case "yarn":
            factor = section.number("factor", longest / original)
            return YarnScaling(
                factor=factor,
                original_max_position_embeddings=original,
                attention_factor=_read_attention_factor(section, factor),
                beta_fast=section.number("beta_fast", 32.0),
                beta_slow=section.number("beta_slow", 1.0),
                truncate=section.flag("truncate", True),
            )
    raise ModelError(f"rope type {rope_type} is not supported (supported: {_SUPPORTED})")


def _read_attention_factor(section: Fields, factor: float) -> float:
    """YaRN's factor on cosine and sine: given, or from the two mscales (DeepSeek), or from the factor alone."""
    given = section.optional_number("attention_factor")
    if given is not None:
        return given
    mscale, mscale_all_dim = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return _temper(factor, mscale) / _temper(factor, mscale_all_dim)
    return _temper(factor, 1.0)


def _temper(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
