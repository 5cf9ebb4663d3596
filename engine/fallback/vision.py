"""Loads what of a checkpoint sees as transformers' module: the part that encodes pictures, and what projects them."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, MllamaModel

from weft.engine.fallback.loading import Promise, quiet_and_one_by_one
from weft.engine.vision.checkpoint import seeing_tensors
from weft.engine.vision.eyes import Encoder
from weft.engine.vision.slices import may_pause
from weft.engine.wire.errors import ModelError

_AUTO_CONFIG: Any = AutoConfig  # these two without types
_MODELS: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def load_encoder(folder: Path, device: torch.device, dtype: torch.dtype) -> Encoder:
    """Load the encoder of a checkpoint's pictures, whose module has `get_image_features` or is that of Llama 3.2.

    The module is made with a text half that has no layers and one token, and none of that half's tensors is read.

    Raises:
        ModelError: A tensor is missing or has another shape, or transformers cannot make the module.
    """
    whole, names = seeing_tensors(folder)
    promises = {name: Promise(whole.read, name) for name in names}
    try:
        config = _without_text(_AUTO_CONFIG.from_pretrained(folder, trust_remote_code=False, local_files_only=True))
        with quiet_and_one_by_one():
            module, report = _MODELS[type(config)].from_pretrained(
                None, config=config, state_dict=promises, dtype=dtype, output_loading_info=True
            )
    except ModelError:
        raise
    except Exception as error:  # whatever somebody else's module raises
        fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ModelError(f"what sees in the checkpoint cannot be loaded ({fault})") from None
    body = module.model.eval()
    text = _names_of_text(module)
    for name in sorted(name for name in report["missing_keys"] if not name.startswith(text)):
        raise ModelError(f"tensor {name} is missing from the checkpoint")
    torch.nn.Module.to(body, device)
    may_pause(body)
    scale = getattr(config.get_text_config(), "embedding_multiplier", 1.0)  # Granite's: of features as of embeddings

    def encode(arrays: Mapping[str, Tensor]) -> Tensor:
        given = {name: array.to(dtype) if array.is_floating_point() else array for name, array in arrays.items()}
        made = body.get_image_features(**given)
        kinds = [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]
        return torch.cat([_joined(features) for features in kinds], -1) * scale

    return partial(_of_tiles, body) if isinstance(body, MllamaModel) else encode


def _of_tiles(body: Any, arrays: Mapping[str, Tensor]) -> Tensor:
    """Features of the tiles of a picture, without those of the tiles that pad it to the most that there are."""
    names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    seen = body.vision_model(**{name: arrays[name] for name in names}).last_hidden_state[0, 0]
    features: Tensor = body.multi_modal_projector(seen[arrays["aspect_ratio_mask"][0, 0].bool()])
    return features.flatten(0, 1)


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """(num_features, hidden_size) of features that may be in parts."""
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _without_text(config: Any) -> Any:
    """A configuration whose text half takes next to no memory. What sees is not quantized, whatever the rest is."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for part in (config, text):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    if getattr(config, "audio_config", None) is not None:
        config.audio_config = None  # it may also hear
    if getattr(text, "hidden_size_per_layer_input", 0):
        text.hidden_size_per_layer_input = 0
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    return config


def _names_of_text(module: Any) -> tuple[str, ...]:
    """Beginnings of the names of the text half, and of the output head."""
    halves = [name for name, part in module.named_modules() if part is module.get_decoder()]
    return (*(f"{name}." for name in halves), "lm_head.")
