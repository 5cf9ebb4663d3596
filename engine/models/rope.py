"""Reads the rotary embedding of a checkpoint, in the dialects of transformers 4 and 5.

Version 4 has rope_theta and rope_scaling, version 5 rope_parameters. What the rotary layer cannot compute is refused by
name.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.layers.rotary import (
    NO_ROPE,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from weft.engine.models.families.family import FamilySwitches
from weft.engine.shared.errors import ModelError

_DEFAULT_THETA = 10_000.0


def read_ropes(
    fields: Fields, switches: FamilySwitches, windows: Sequence[int | None], head_dim: int, longest: int
) -> tuple[RopeConfig, ...]:
    """The rotary embedding of every layer.

    Args:
        windows: Of every layer.
        longest: Longest context, before it is extended.

    Raises:
        ModelError: config.json asks for a type that is not supported.
    """
    kinds = {None: "full_attention"} | {window: "sliding_attention" for window in windows if window is not None}
    by_kind = {}
    if switches.has_rope:
        for window, kind in kinds.items():
            own_dim = switches.full_head_dim if window is None else None
            by_kind[window] = replace(read_rope(fields, own_dim or head_dim, longest, kind), head_dim=own_dim)
            if window is not None and switches.local_rope_theta is not None and not _sections(fields)[kind].names():
                by_kind[window] = replace(by_kind[window], theta=switches.local_rope_theta, scaling=None)
    return tuple(
        NO_ROPE if layer in switches.ropeless else by_kind.get(window, NO_ROPE) for layer, window in enumerate(windows)
    )


def read_rope(fields: Fields, head_dim: int, longest: int, kind: str = "full_attention") -> RopeConfig:
    """The rotary embedding that config.json asks for in layers of a kind, for heads of head_dim values."""
    by_kind = _sections(fields)
    section = by_kind[kind] if by_kind[kind].names() else by_kind[""]
    theta = section.number("rope_theta", fields.number("rope_theta", _DEFAULT_THETA))
    share = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    is_proportional = section.optional_text("rope_type") == "proportional"
    rotary_dim = head_dim if is_proportional else fields.integer("rotary_dim", int(head_dim * share))
    if rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
        raise ModelError(f"rotary embedding of {rotary_dim} values in heads of {head_dim} is not supported")
    if section.optional_text("type") == "dynamic" or section.optional_text("rope_type") == "dynamic":
        alpha = section.optional_number("alpha")  # Hunyuan's, for contexts of all lengths
        if alpha is not None:
            theta *= alpha ** (rotary_dim / (rotary_dim - 2))
    original = fields.integer("original_max_position_embeddings", longest)
    scaling = _read_scaling(section, original, longest, rotary_dim)
    return RopeConfig(theta, scaling, None if rotary_dim == head_dim else rotary_dim)


def _sections(fields: Fields) -> dict[str, Fields]:
    """The parameters by kind of layer; under "" what stands for all kinds."""
    section = fields.section("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    kinds = {kind: section.section(kind) for kind in ("full_attention", "sliding_attention")}
    return {**kinds, "": section}


def longest_context(ropes: Iterable[RopeConfig], longest: int) -> int:
    """How far positions reach.

    Published YaRN recipes leave max_position_embeddings at its value before the extension. The second set of
    frequencies of LongRoPE would change the keys of all tokens when a context outgrows the first one.
    """
    for rope in ropes:
        if isinstance(rope.scaling, YarnScaling):
            longest = max(longest, int(rope.scaling.factor * rope.scaling.original_max_position_embeddings))
        elif isinstance(rope.scaling, LongScaling):
            longest = min(longest, rope.scaling.original_max_position_embeddings)
    return longest


def _read_scaling(section: Fields, original: int, longest: int, rotary_dim: int) -> RopeScaling | None:
    original = section.integer("original_max_position_embeddings", original)
    match rope_type := section.optional_text("rope_type") or section.optional_text("type") or "default":
        case "default" | "mrope" | "dynamic":  # which differ for images, and for contexts beyond the longest
            return None
        case "proportional":
            return ProportionalScaling(section.number("partial_rotary_factor", 1.0), section.number("factor", 1.0))
        case "linear":
            return LinearScaling(section.number("factor"))
        case "llama3":
            low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
            return Llama3Scaling(section.number("factor"), low, high, original_max_position_embeddings=original)
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
        case "longrope" | "su":
            factors = section.numbers("short_factor")
            if len(factors) != rotary_dim // 2:
                raise section.wrong("short_factor", f"a list of {rotary_dim // 2} numbers")
            extension = section.number("factor", longest / original)
            factor = math.sqrt(1 + math.log(extension) / math.log(original)) if extension > 1 else 1.0
            return LongScaling(factors, original, section.number("attention_factor", factor))
    raise ModelError(
        f"rope type {rope_type} is not supported "
        "(supported: default, linear, dynamic, llama3, longrope, proportional, yarn)"
    )


def _read_attention_factor(section: Fields, factor: float) -> float:
    """YaRN's multiplier of cosine and sine: as given, or from the two mscales (DeepSeek), or from the factor alone."""
    given = section.optional_number("attention_factor")
    if given is not None:
        return given
    mscale, mscale_all_dim = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return _attention_factor(factor, mscale) / _attention_factor(factor, mscale_all_dim)
    return _attention_factor(factor, 1.0)


def _attention_factor(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
