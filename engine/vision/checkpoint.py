"""Finds how a checkpoint sees, from its files alone. Imports no transformers.

Of a checkpoint of no family that is known to see, the text half is served, and the server refuses pictures by name.
"""

import logging
import math
from dataclasses import replace
from pathlib import Path

import torch

from weft.engine.describe.config import ModelConfig
from weft.engine.fields import Fields
from weft.engine.vision.families import SEEING
from weft.engine.weights.tensor_files import CheckpointSource
from weft.engine.wire.errors import ModelError
from weft.engine.wire.options import EngineOptions
from weft.engine.wire.pictures import Vision

logger = logging.getLogger(__name__)


def read_vision(folder: Path, outer: Fields) -> Vision | None:
    """How the checkpoint in a folder sees; None if it does not, or not in a way that is known.

    Args:
        outer: Its config.json, of which the text half is only a part.

    Raises:
        ModelError: A file is missing or malformed.
    """
    family = next((SEEING[name] for name in outer.texts("architectures") if name in SEEING), None)
    if family is None:
        return None
    fault = None
    if outer.has("quantization_config") or outer.section("text_config").has("quantization_config"):
        fault = "it is quantized"
    elif not any((folder / name).exists() for name in ("processor_config.json", "preprocessor_config.json")):
        fault = "preprocessor_config.json is missing"
    if fault:
        logger.warning("only text is served: pictures are not read, since %s", fault)
        return None
    names = ("image_token_id", "image_token_index")
    token_id = next((outer.integer(name) for name in names if outer.has(name)), None)
    if token_id is None:
        return None
    own, text = outer.section("vision_config"), outer.section("text_config")
    text = text if text.names() else outer  # older files of Qwen keep all in one
    rope = text.section("rope_scaling" if text.has("rope_scaling") else "rope_parameters")
    sections = family.sections and (rope.integers("mrope_section") or family.sections)
    stacked = own.integers("deepstack_visual_indexes") if own.has("deepstack_visual_indexes") else (8, 16, 24)
    num_stacked = len(stacked) if family.is_stacked else 0
    return Vision(token_id, _num_values(folder), sections, family.is_interleaved, num_stacked)


def served_vision(vision: Vision | None, options: EngineOptions) -> Vision | None:
    """How an engine with these options sees; None if it reads only text."""
    return vision if options.pictures and options.num_ranks == 1 and options.load_format != "dummy" else None


def with_vision(config: ModelConfig, vision: Vision) -> ModelConfig:
    """The text half with what it needs for pictures: positions on axes, features behind its first layers.

    Raises:
        ModelError: The sections do not divide the frequencies.
    """
    ropes = config.ropes
    if vision.sections:
        dims = [rope.head_dim or config.head_dim if rope.rotary_dim is None else rope.rotary_dim for rope in ropes]
        ropes = tuple(replace(r, axes=_axes(vision, dim // 2)) for r, dim in zip(ropes, dims, strict=True))
    return replace(config, ropes=ropes, num_stacked=vision.num_stacked)


def _axes(vision: Vision, num_frequencies: int) -> tuple[int, ...]:
    """The axis of each frequency: 0 is time, 1 rows, 2 columns."""
    sections = vision.sections
    if vision.is_interleaved and len(sections) == 3:
        return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(num_frequencies))
    if vision.is_interleaved or sum(sections) != num_frequencies:
        raise ModelError(f"mrope_section must divide {num_frequencies} frequencies by three axes, got {list(sections)}")
    return tuple(section % 3 for section, size in enumerate(sections) for _ in range(size))


def _num_values(folder: Path) -> int:
    """Of the tensors that are no part of the text half; 0 where `weft plan` has none of them."""
    try:
        whole, half = (CheckpointSource(folder, torch.device("cpu"), is_half=is_half) for is_half in (False, True))
    except ModelError:
        return 0
    of_text = {half.name_in_files(name) for name in half.names}
    return sum(math.prod(whole.shape(name) or ()) for name in whole.names if name not in of_text)
