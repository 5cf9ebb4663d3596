"""Which kernels compute a model: chosen once, by device, dtype and sizes."""

import functools
import logging
import os
from dataclasses import replace
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
from weft.engine.sampling.sampler import TORCH_SAMPLING, SamplingKit
from weft.engine.shared.errors import ModelError

logger = logging.getLogger(__name__)

_TRITON_CAPABILITY = 8, 0
"""GPUs from here on have matrix units for bfloat16, and copy to shared memory by themselves."""

_NOT_DETERMINISTIC = (
    "deterministic is for Weft's own {}, and there is none for this model here: on a CPU it wants dtype bfloat16 and "
    "the compiled kernels, on CUDA Triton"
)


def choose_kit(model: ModelConfig, config: EngineConfig) -> LayerKit:
    """Weft's own layers where they can compute the model, native on the CPU and Triton's on CUDA, else torch's.

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
    if config.device.type == "cuda" and _has_triton(config.device):
        from weft.engine.kernels.triton.triton_kit import TritonKit  # not installed where there is no CUDA

        return TritonKit(config.is_deterministic)
    return torch_kit(config.device, config.dtype, config.is_deterministic)


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
    """Weft's own attention where it can serve the cache, else the reference; allocates the cache.

    Args:
        num_heads: Query heads of every layer.

    Raises:
        ModelError: The cache is to be fp8, which only Weft's own attention on CUDA keeps, and Triton is missing; or
            results are to be deterministic, and those of the reference are not.
    """
    if config.device.type == "cuda" and _has_triton(config.device):
        from weft.engine.kernels.triton.attention import TritonBackend  # not installed where there is no CUDA
        from weft.engine.kernels.triton.attention_tuning import BatchLimits

        is_flash = config.prefill_attention == "flash" and all(flash.supports(g.spec, config.dtype) for g in groups)
        return TritonBackend(
            groups,
            num_blocks,
            config.block_size,
            config.dtype,
            config.device,
            num_heads=num_heads,
            limits=BatchLimits(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len),
            cache_dtype=config.kv_cache_dtype,
            is_deterministic=config.is_deterministic,
            fresh=flash.flash_attention if is_flash else None,
        )
    if config.is_kv_cache_fp8:
        raise ModelError("kv_cache_dtype fp8 needs Triton and a C compiler, which it runs at start-up")
    cache = (groups, num_blocks, config.block_size, config.dtype, config.device)
    native = library.load() if supports_attention(groups, config.block_size, config.dtype, config.device) else None
    if native:
        return NativeBackend(*cache, native)
    if config.is_deterministic:
        raise ModelError(_NOT_DETERMINISTIC.format("attention"))
    return SdpaBackend(*cache)


def settle_prefill(groups: tuple[CacheGroup[CacheSpec], ...], config: EngineConfig, num_heads: int) -> EngineConfig:
    """Decide what attends in fresh prompts on CUDA, by measuring where FlashAttention 2 can serve the model.

    Raises:
        ModelError: What is asked for cannot.
    """
    asked = config.prefill_attention
    if config.device.type != "cuda":
        return config
    if not _has_triton(config.device):
        if asked != "auto":
            raise ModelError(f"prefill_attention {asked} needs Triton and a C compiler, which it runs at start-up")
        return config
    paged = paged_groups(groups)
    can = bool(paged) and not config.is_deterministic and all(flash.supports(g.spec, config.dtype) for g in paged)
    if asked == "flash" and not can:
        raise ModelError(
            "prefill_attention flash needs dtype bfloat16 or float16, heads of at most 256 values, a multiple of 8, "
            "scores without a soft cap or a scale of their own, and not deterministic"
        )
    if asked != "auto" or not paged:
        return config
    group = min(paged, key=lambda group: group.spec.sliding_window or 0)  # the first without a window, if there is one

    def make(choice: str, num_blocks: int) -> AttentionBackend:
        layer = (CacheGroup(group.spec, (0,)),)
        return make_backend(layer, num_blocks, replace(config, prefill_attention=choice), num_heads)

    is_flash = can and flash.is_faster(make, group.spec, num_heads, config)
    return replace(config, prefill_attention="flash" if is_flash else "triton")


def _has_triton(device: torch.device) -> bool:
    """Whether Triton is there, can compile, and knows the device."""
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < _TRITON_CAPABILITY:
        return False
    return _triton_works()


@functools.cache
def _triton_works() -> bool:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # fused multiply-adds, which newer ones turn off unasked
    import triton

    try:
        triton.runtime.driver.active.get_current_target()  # compiles a little C
    except Exception as error:  # whatever a compiler or linker may lack: torch's kernels serve as well
        logger.warning("Triton cannot be used; attention, layers and sampling are torch's: %s", error)
        return False
    return True


def choose_sampling(device: torch.device) -> SamplingKit:
    """Weft's own sampler, native on the CPU and Triton's on CUDA, there with its own penalties, else torch's."""
    if device.type == "cuda" and _has_triton(device):
        from weft.engine.kernels.triton import penalties as triton_penalties  # not installed where there is no CUDA
        from weft.engine.kernels.triton.sampling import TritonSampler

        return SamplingKit(triton_penalties.apply_penalties, TritonSampler())
    native = library.load() if device.type == "cpu" else None
    return SamplingKit(apply_penalties, NativeSampler(native)) if native else TORCH_SAMPLING


def choose_graph_sampler(device: torch.device, vocab_size: int) -> GraphSampler | None:
    """What samples in CUDA graphs as `choose_sampling` does outside of them; None where only the best id can be had."""
    if device.type != "cuda" or not _has_triton(device):
        return None
    from weft.engine.kernels.triton.sampling import TritonGraphSampler  # not installed where there is no CUDA

    return TritonGraphSampler(vocab_size)


def set_num_threads(kit: LayerKit, caches: Caches, sampling: SamplingKit, number: int) -> None:
    """Let the layers, the attention and the sampler of a model share the work of a step among so many threads.

    Where the first two are Weft's own, torch is left the caller's thread for the little that it still does: its threads
    go on spinning for some 20 ms after each operation, on the cores that Weft's threads are to run on.
    """
    are_native = isinstance(kit, NativeKit), isinstance(caches.attention, NativeBackend)
    if (any(are_native) or isinstance(sampling.pick_ids, NativeSampler)) and (native := library.load()):
        native.set_num_threads(number)
    torch.set_num_threads(1 if all(are_native) else number)
