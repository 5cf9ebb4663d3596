"""Which kernels compute a model: chosen once, by device, dtype and sizes."""

import torch

from engine.attention.backend import AttentionBackend, KVGroup
from engine.attention.native import NativeBackend
from engine.attention.native import supports as supports_attention
from engine.attention.sdpa import SdpaBackend
from engine.config import EngineConfig
from engine.layers.kit import LayerKit, torch_kit
from engine.models.config import ModelConfig
from engine.models.errors import ModelError
from engine.native import library
from engine.native.layers import NativeKit
from engine.native.layers import supports as supports_layers
from engine.sampling.native import NativeSampler
from engine.sampling.sampler import PickIds, pick_ids

_NOT_DETERMINISTIC = (
    "deterministic is for Weft's own {}, and there is none for this model here: on a CPU it wants dtype bfloat16 and "
    "the compiled kernels, on CUDA Triton"
)


def choose_kit(model: ModelConfig, config: EngineConfig) -> LayerKit:
    """Weft's own layers where they can compute the model, else torch's.

    Raises:
        ModelError: Matrices are to be int8, which only Weft's own layers compute, and they cannot; or results are to be
            deterministic on a CPU, which goes for these layers alone.
    """
    native = library.load() if supports_layers(model, config.dtype, config.device) else None
    if native:
        return NativeKit(native, config.is_int8)
    if config.is_int8:
        raise ModelError(
            "quantization int8 needs Weft's native kernels, and they were not compiled or cannot compute this model"
        )
    if config.is_deterministic and config.device.type == "cpu":
        raise ModelError(_NOT_DETERMINISTIC.format("layers"))
    return torch_kit(config.device, config.dtype, config.is_deterministic)


def make_backend(groups: tuple[KVGroup, ...], num_blocks: int, config: EngineConfig) -> AttentionBackend:
    """Weft's own attention where it can serve the cache, else the reference; allocates the cache.

    Raises:
        ModelError: Results are to be deterministic, and those of the reference are not.
    """
    cache = (groups, num_blocks, config.block_size, config.dtype, config.device)
    native = library.load() if supports_attention(groups, config.block_size, config.dtype, config.device) else None
    if native:
        return NativeBackend(*cache, native)
    if config.is_deterministic:
        raise ModelError(_NOT_DETERMINISTIC.format("attention"))
    return SdpaBackend(*cache)


def choose_sampler(device: torch.device) -> PickIds:
    """Weft's own sampler on the CPU, else torch's."""
    native = library.load() if device.type == "cpu" else None
    return NativeSampler(native) if native else pick_ids


def set_num_threads(kit: LayerKit, backend: AttentionBackend, sampler: PickIds, number: int) -> None:
    """Let the layers, the attention and the sampler of a model share the work of a step among so many threads.

    Where the first two are Weft's own, torch is left the caller's thread for the little that it still does: its threads
    go on spinning for some 20 ms after each operation, on the cores that Weft's threads are to run on.
    """
    are_native = isinstance(kit, NativeKit), isinstance(backend, NativeBackend)
    if (any(are_native) or isinstance(sampler, NativeSampler)) and (native := library.load()):
        native.set_num_threads(number)
    torch.set_num_threads(1 if all(are_native) else number)
