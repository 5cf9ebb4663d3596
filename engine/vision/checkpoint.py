"""Finds how a checkpoint sees, from its files alone. Imports no transformers.

Of a checkpoint of no family that is known to see, the text half is served, and the server refuses pictures by name.
"""

import importlib.util
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from weft.engine.describe.config import ModelConfig, ModelFacts
from weft.engine.fields import Fields
from weft.engine.gguf.tensors import GgufSource
from weft.engine.vision.families import SEEING, SeeingFamily
from weft.engine.weights.tensor_files import CheckpointSource
from weft.engine.wire.errors import ModelError
from weft.engine.wire.options import EngineOptions
from weft.engine.wire.pictures import Vision

logger = logging.getLogger(__name__)

_PLAIN: Final = (torch.float32, torch.float16, torch.bfloat16, torch.int64)
"""Types of weights that are not quantized, and of numbers of positions."""
PLANNED_VALUES: Final = 16 << 20
"""Of the largest picture, as the model reads it, that memory is planned for: 21 parts of 512 x 512 pixels. A larger one
needs memory that is free by chance, or else is refused."""


def read_vision(folder: Path, outer: Fields) -> Vision | None:
    """How the checkpoint in a folder sees; None if it does not, or not in a way that is known.

    Args:
        outer: Its config.json, of which the text half is only a part.
    """
    family = next((SEEING[name] for name in outer.texts("architectures") if name in SEEING), None)
    try:
        return _read_vision(folder, outer, family) if family else None
    except ModelError as error:  # of what a text needs nothing of
        logger.warning("only text is served: pictures are not read, since %s", error)
        return None


def _read_vision(folder: Path, outer: Fields, family: SeeingFamily) -> Vision | None:
    fault: str | None = None
    shapes, is_plain = _tensors(folder)
    if not is_plain:
        fault = "what sees is quantized"
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
    stacked = own.integers("deepstack_visual_indexes") if own.has("deepstack_visual_indexes") else (8, 16, 24)
    return Vision(
        token_id,
        sum(map(math.prod, shapes)),
        _num_encoding_values(own),
        sections=family.sections and (rope.integers("mrope_section") or family.sections),
        is_interleaved=family.is_interleaved,
        num_stacked=len(stacked) if family.is_stacked else 0,
        longest=_longest(folder, outer, family),
        embedded_id=text.integer("pad_token_id", 0) if family.embeds_padding else None,
        num_attended=_num_features(own) if family.is_attended else 0,
    )


def _num_encoding_values(vision: Fields) -> int:
    """Of a layer, for all patches of a picture of `PLANNED_VALUES`, with the picture itself in two types.

    A layer has what goes into it, norms, queries, keys, values, what they make, and the parts of its feed-forward half.
    """
    width = vision.integer("embed_dim" if vision.has("embed_dim") else "hidden_size", 1152)
    inner = vision.integer("intermediate_size", 4 * width)
    patch = max(min(vision.integers("patch_size"), default=14), 1)
    return PLANNED_VALUES // (3 * patch**2) * (8 * width + 3 * inner) + 3 * PLANNED_VALUES


def _num_features(fields: Fields) -> int:
    """Of the picture with the most tiles, each of which has one for every patch and one for all of them."""
    patches = fields.size("image_size", 448) // fields.size("patch_size", 14)
    return fields.size("max_num_tiles", 4) * (patches**2 + 1)


def served_vision(vision: Vision | None, options: EngineOptions) -> Vision | None:
    """How an engine with these options sees; None if it reads only text, also where nothing could decode pictures."""
    is_whole = options.pipeline_parallel_size == 1 and options.load_format != "dummy"
    is_there = options.pictures and is_whole and importlib.util.find_spec("PIL") is not None
    if vision is None or not is_there:
        return None
    # Layers that attend to pictures see some tokens of a step, and adapters would take them for all. Their attention is
    # torch's, whose sums depend on the number of tokens.
    is_plain = options.num_ranks == 1 and not options.max_loras and not options.deterministic
    return vision if is_plain or not vision.num_attended else None


def _longest(folder: Path, outer: Fields, family: SeeingFamily) -> int:
    """`Vision.longest`, by the first file that says it."""
    if family.longest is None:
        return 0
    paths = [folder / name for name in ("processor_config.json", "preprocessor_config.json")]
    files = [Fields.read(path) for path in paths if path.exists()]
    name, default = family.longest
    places = (outer, *(place for file in files for place in (file.section("image_processor"), file)))
    return next((place.size(name) for place in places if place.has(name)), default)


def as_served(model: ModelFacts, options: EngineOptions) -> ModelFacts:
    """The model with what its text half needs for pictures, where it is shown any.

    Raises:
        ModelError: See `with_vision`.
    """
    vision = served_vision(model.vision, options)
    return with_vision(model, vision) if vision and isinstance(model, ModelConfig) else model


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


def seeing_tensors(folder: Path) -> tuple[CheckpointSource, tuple[str, ...]]:
    """The tensors of a checkpoint under its own names, and which of these are no part of the text half.

    Raises:
        ModelError: There are no files, or config.json is malformed.
    """
    kind = GgufSource if _is_gguf(Fields.read(folder / "config.json")) else CheckpointSource
    whole, half = (kind(folder, torch.device("cpu"), is_half=is_half) for is_half in (False, True))
    of_text = {half.name_in_files(name) for name in half.names}
    return whole, tuple(name for name in whole.names if name not in of_text)


def _is_gguf(outer: Fields) -> bool:
    """Whether the folder was made of GGUF files, of which one is for what sees."""
    return outer.section("quantization_config").optional_text("quant_method") == "gguf"


def _tensors(folder: Path) -> tuple[list[tuple[int, ...]], bool]:
    """Shapes of the tensors that are no part of the text half, and whether all are stored as they are.

    `weft plan` has no tensors of a model that is not fetched yet. Those of GGUF files come as plain ones.
    """
    try:
        whole, names = seeing_tensors(folder)
    except ModelError:
        return [], True
    is_plain = isinstance(whole, GgufSource) or all(whole.dtype(name) in _PLAIN for name in names)
    return [whole.shape(name) or () for name in names], is_plain
