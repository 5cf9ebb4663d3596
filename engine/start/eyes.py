"""Loads what sees pictures, and says what bounds it sets to a request."""

import logging
import time

from msgspec.structs import replace as replace_fields

from weft.engine import config as engine_config
from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelFacts
from weft.engine.layers.block import Decoder, LoadedModel
from weft.engine.memory_plan import MemoryPlan
from weft.engine.ranks.ranked_runner import RankedEyes
from weft.engine.ranks.ranks import Ranks
from weft.engine.vision.attended import AttendingEyes, most_pictures
from weft.engine.vision.checkpoint import PLANNED_VALUES, served_vision
from weft.engine.vision.eyes import Eyes, bounded
from weft.engine.wire.inputs import InputLimits

logger = logging.getLogger(__name__)


def load_eyes(model: LoadedModel, model_config: ModelFacts, config: EngineConfig, ranks: Ranks | None) -> Eyes | None:
    """What sees pictures; None if only text is served."""
    if (vision := served_vision(model_config.vision, config.options)) is None or not isinstance(model, Decoder):
        if model_config.vision:
            needs = "the setting pictures, Pillow (the extra weft[images]), one stage, and no random weights"
            needs += "; Llama 3.2: one rank, neither max_loras nor deterministic" * bool(
                model_config.vision.num_attended
            )
            logger.warning("only text is served: pictures need %s", needs)
        return None
    from weft.engine.fallback.vision import load_encoder  # imports transformers

    began = time.perf_counter()
    encode = load_encoder(config.model, config.device, config.dtype)
    taken = time.perf_counter() - began
    logger.info("pictures are read; %d weights that see were loaded in %.1f s", vision.num_values, taken)
    if config.device.type == "cpu":
        bytes_per_pixel = vision.num_encoding_values * config.dtype.itemsize / PLANNED_VALUES
        encode = bounded(encode, bytes_per_pixel, lambda: engine_config.available_memory_bytes(config.device))
    if vision.num_attended:
        return AttendingEyes(model, encode, config.device)
    parts = model, encode, config.device, vision.embedded_id
    return RankedEyes(ranks, *parts) if ranks else Eyes(*parts)


def input_limits(plan: MemoryPlan, model_config: ModelFacts, config: EngineConfig) -> InputLimits:
    """What an input may be, with the bounds of pictures where they are seen."""
    vision = served_vision(model_config.vision, config.options)
    limits = plan.input_limits(model_config)
    if vision is None:
        return limits
    most = most_pictures(config.device) if vision.num_attended else 0
    token_id, longest = vision.token_id, model_config.num_mutual
    return replace_fields(limits, picture_token=token_id, longest_picture=longest, max_attended=most)
