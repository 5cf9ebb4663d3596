"""Finds how a checkpoint sees, from its files alone. Imports no transformers.

Of a checkpoint of no family that is known to see, the text half is served, and the server refuses pictures by name.
"""

import logging
import math
from pathlib import Path

import torch

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
    if SEEING.keys().isdisjoint(outer.texts("architectures")):
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
    is_attended = any(SEEING[name].is_attended for name in outer.texts("architectures") if name in SEEING)
    return Vision(token_id, _num_values(folder), _num_features(outer.section("vision_config")) if is_attended else 0)


def served_vision(vision: Vision | None, options: EngineOptions) -> Vision | None:
    """How an engine with these options sees; None if it reads only text."""
    if vision is None or not options.pictures or options.num_ranks > 1 or options.load_format == "dummy":
        return None
    # Layers that attend to pictures see some tokens of a step, and adapters would take them for all. Their attention is
    # torch's, whose sums depend on the number of tokens.
    return None if vision.num_attended and (options.max_loras or options.deterministic) else vision


def _num_features(fields: Fields) -> int:
    """Of the picture with the most tiles, each of which has one for every patch and one for all of them."""
    patches = fields.size("image_size", 448) // fields.size("patch_size", 14)
    return fields.size("max_num_tiles", 4) * (patches**2 + 1)


def _num_values(folder: Path) -> int:
    """Of the tensors that are no part of the text half; 0 where `weft plan` has none of them."""
    try:
        whole, half = (CheckpointSource(folder, torch.device("cpu"), is_half=is_half) for is_half in (False, True))
    except ModelError:
        return 0
    of_text = {half.name_in_files(name) for name in half.names}
    return sum(math.prod(whole.shape(name) or ()) for name in whole.names if name not in of_text)
