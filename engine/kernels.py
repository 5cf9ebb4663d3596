"""Which kernels compute a model: chosen once, by device, dtype and sizes, and said in the log."""

import logging

import torch

from engine.attention.backend import AttentionBackend, KVGroup
from engine.attention.native import NativeBackend
from engine.attention.native import supports as supports_attention
from engine.attention.sdpa import SdpaBackend
from engine.config import EngineConfig
from engine.layers.kit import LayerKit, torch_kit
from engine.models.config import ModelConfig
from engine.native import library
from engine.native.layers import NativeKit
from engine.native.layers import supports as supports_layers

logger = logging.getLogger(__name__)


def choose_kit(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> LayerKit:
    """Weft's own layers where they can compute the model, else torch's."""
    native = library.load() if supports_layers(model, dtype, device) else None
    return NativeKit(native) if native else torch_kit(device, dtype)


def make_backend(groups: tuple[KVGroup, ...], num_blocks: int, config: EngineConfig) -> AttentionBackend:
    """Weft's own attention where it can serve the cache, else the reference; allocates the cache."""
    cache = (groups, num_blocks, config.block_size, config.dtype, config.device)
    native = library.load() if supports_attention(groups, config.block_size, config.dtype, config.device) else None
    return NativeBackend(*cache, native) if native else SdpaBackend(*cache)
