"""Chooses, by device, dtype and sizes, the kernels that compute a model."""

import functools
import logging
import os
from importlib.util import find_spec

import torch

from weft.engine.cache.specs import CacheGroup, CacheSpec, PagedKV, StateSpec, paged_groups
from weft.engine.kernels.caches import Caches
from weft.engine.kernels.cpu import library
from weft.engine.kernels.cpu.attention import NativeBackend
from weft.engine.kernels.cpu.attention import supports as supports_attention
from weft.engine.kernels.cpu.native_kit import NativeKit
from weft.engine.kernels.cpu.native_kit import supports as supports_layers
from weft.engine.kernels.cpu.sampling import NativeSampler
from weft.engine.kernels.torch.sampling import TORCH_SAMPLING
from weft.engine.kernels.torch.sdpa import SdpaBackend
from weft.engine.kernels.torch.states import StateCache
from weft.engine.kernels.torch.torch_kit import torch_kit
from weft.engine.kernels.triton import flash
from weft.engine.layers.attention import AttentionBackend
from weft.engine.layers.kit import LayerKit
from weft.engine.models.config import ModelConfig
from weft.engine.run.config import EngineConfig
from weft.engine.sampling.in_graph import GraphSampler
from weft.engine.sampling.logits_processors import apply_penalties
from weft.engine.sampling.sampler import SamplingKit
from weft.engine.shared.errors import ModelError

logger = logging.getLogger(__name__)

# GPUs from here on have matrix units for bfloat16 and asynchronous copies to shared memory.
_TRITON_CAPABILITY = 8, 0

_NOT_DETERMINISTIC = (
    "deterministic is for Weft's own {}, and there is none for this model here: on a CPU it needs dtype bfloat16 and "
    "the compiled kernels, on CUDA Triton"
)


def choose_kit(model: ModelConfig, config: EngineConfig) -> LayerKit:
    """Weft's own layers if they can compute the model, native on the CPU and Triton on CUDA, else torch's.

    Raises:
        ModelError: int8 matrices, or deterministic results on a CPU, are asked for, and Weft's own layers, which alone
            have them, cannot compute the model.
    """
    native = library.load() if supports_layers(model, config.dtype, config.device) else None
    if native:
        return NativeKit(native, config.options.quantization == "int8")
    if config.options.quantization == "int8":
        raise ModelError(
            "quantization int8 needs Weft's native kernels, and they were not compiled or cannot compute this model"
        )
    if config.options.deterministic and config.device.type == "cpu":
        raise ModelError(_NOT_DETERMINISTIC.format("layers"))
    if has_triton(config.device):
        from weft.engine.kernels.triton.triton_kit import TritonKit  # not installed without CUDA

        return TritonKit(config.options.deterministic)
    return torch_kit(config.device, config.dtype, config.options.deterministic)


def choose_linear_kit(config: EngineConfig) -> LayerKit | None:
    """Weft's own matrices on the CPU, for a model whose other layers are not Weft's; None if they cannot serve it."""
    is_served = config.device.type == "cpu" and config.dtype == torch.bfloat16
    native = library.load() if is_served else None
    return NativeKit(native) if native else None


def make_caches(
    groups: tuple[CacheGroup[CacheSpec], ...], num_blocks: int, config: EngineConfig, num_heads: int
) -> Caches:
    """A backend for each kind of cache that a model keeps; see `make_backend`."""
    states = {index: CacheGroup(g.spec, g.layers) for index, g in enumerate(groups) if isinstance(g.spec, StateSpec)}
    return Caches(
        make_backend(paged_groups(groups), num_blocks, config, num_heads),
        StateCache(states, config.max_num_seqs, config.device) if states else None,
    )


def make_backend(
    groups: tuple[CacheGroup[PagedKV], ...], num_blocks: int, config: EngineConfig, num_heads: int
) -> AttentionBackend:
    """Weft's own attention if it can serve the cache, else the reference; allocates the cache.

    Args:
        num_heads: Query heads of every layer.

    Raises:
        ModelError: An fp8 cache, or deterministic results, are asked for, and Weft's own attention, which alone has
            them, cannot serve the cache.
    """
    cache = (groups, num_blocks, config.block_size, config.dtype, config.device)
    if has_triton(config.device):
        from weft.engine.kernels.triton.attention import TritonBackend  # not installed without CUDA
        from weft.engine.kernels.triton.attention_tuning import BatchLimits

        is_flash = config.prefill_attention == "flash" and all(flash.supports(g.spec, config.dtype) for g in groups)
        return TritonBackend(
            *cache,
            num_heads=num_heads,
            limits=BatchLimits(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len),
            cache_dtype=config.kv_cache_dtype,
            is_deterministic=config.options.deterministic,
            fresh=flash.flash_attention if is_flash else None,
        )
    if config.is_kv_cache_fp8:
        raise ModelError("kv_cache_dtype fp8 needs Triton and a C compiler, which it runs at start-up")
    native = library.load() if supports_attention(groups, config.block_size, config.dtype, config.device) else None
    if native:
        return NativeBackend(*cache, native)
    if config.options.deterministic:
        raise ModelError(_NOT_DETERMINISTIC.format("attention"))
    return SdpaBackend(*cache)


def has_triton(device: torch.device) -> bool:
    """Whether this is a CUDA device that Triton supports, and Triton is installed and can compile."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _TRITON_CAPABILITY and _triton_works()


@functools.cache
def _triton_works() -> bool:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # fused multiply-adds, which later versions turn off
    import triton

    try:
        triton.runtime.driver.active.get_current_target()  # compiles a little C
    except Exception as error:  # no compiler or linker that works: torch's kernels replace Triton's
        logger.warning("Triton cannot be used; attention, layers and sampling are torch's: %s", error)
        return False
    return True


def choose_sampling(device: torch.device) -> SamplingKit:
    """Weft's own sampler, native on the CPU, Triton with its own penalties on CUDA, else torch's."""
    if has_triton(device):
        from weft.engine.kernels.triton import penalties as triton_penalties  # not installed without CUDA
        from weft.engine.kernels.triton.sampling import TritonSampler

        return SamplingKit(triton_penalties.apply_penalties, TritonSampler())
    native = library.load() if device.type == "cpu" else None
    return SamplingKit(apply_penalties, NativeSampler(native)) if native else TORCH_SAMPLING


def choose_graph_sampler(device: torch.device, vocab_size: int) -> GraphSampler | None:
    """A sampler for CUDA graphs with the results of `choose_sampling`; None if graphs can only sample greedily."""
    if not has_triton(device):
        return None
    from weft.engine.kernels.triton.sampling import TritonGraphSampler  # not installed without CUDA

    return TritonGraphSampler(vocab_size)


def set_num_threads(kit: LayerKit | None, caches: Caches, sampling: SamplingKit, number: int) -> None:
    """Set how many threads share the work of a model's layers, attention and sampler; kit is None without a kit.

    If layers and attention are Weft's own, torch gets one thread for the little that it still does. Its threads spin
    for about 20 ms after each operation, on the cores that Weft's threads need.
    """
    are_native = isinstance(kit, NativeKit), isinstance(caches.attention, NativeBackend)
    if (any(are_native) or isinstance(sampling.pick_ids, NativeSampler)) and (native := library.load()):
        native.set_num_threads(number)
    torch.set_num_threads(1 if all(are_native) else number)
