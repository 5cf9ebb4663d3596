"""Chooses the kernels that compute a model: its layers, adapters, attention and sampler.

They are those that `EngineConfig.kernels` names, else the preferred ones: Weft's own, where they can. A name that
cannot compute the model here is an error with the reason. Attention comes with its cache. The memory of adapters is
planned before the model is loaded.
"""

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch

from weft.engine.cache.specs import CacheGroup, CacheSpec, ModuleCache, PagedGroups, StateSpec, paged_groups
from weft.engine.config import EngineConfig, has_fp8
from weft.engine.describe.config import ModelConfig
from weft.engine.describe.specs import DecoderSpec
from weft.engine.kernels.cpu import library
from weft.engine.kernels.cpu.attention import NativeBackend
from weft.engine.kernels.cpu.attention import supports as supports_attention
from weft.engine.kernels.cpu.layer_kernels import CpuKernels, NativeSampler, WeightStorage
from weft.engine.kernels.cpu.layer_kernels import supports as supports_layers
from weft.engine.kernels.cpu.layers import NativeLinear
from weft.engine.kernels.cpu.packed import PANEL
from weft.engine.kernels.cpu.products import MAX_RANK, AdapterMemory, NativeSite
from weft.engine.kernels.torch.caches import Caches, ContextBackend, StateCache
from weft.engine.kernels.torch.encoder_step import EncoderCaches
from weft.engine.kernels.torch.layer_kernels import TORCH_SAMPLING, TorchSite, torch_kernels
from weft.engine.kernels.torch.mutual_step import MutualCaches
from weft.engine.kernels.torch.sdpa import SdpaBackend
from weft.engine.kernels.triton.attention_tiles import TileNames
from weft.engine.kernels.triton.prompts import PromptAttention, installed_libraries, prompt_layers
from weft.engine.layers.block import AttentionBackend
from weft.engine.layers.kernels import LayerKernels
from weft.engine.lora.adapted_layers import MakeHead, SavedLimits, Site
from weft.engine.lora.adapters import Adapters, MakeSite
from weft.engine.lora.targets import Targets
from weft.engine.sampling.edits import apply_penalties
from weft.engine.sampling.sampler import GraphSampler, SamplingKernels
from weft.engine.weights.reader import WeightRef
from weft.engine.wire.errors import ModelError

logger = logging.getLogger(__name__)

# GPUs from here on have matrix units for bfloat16 and asynchronous copies to shared memory.
_TRITON_CAPABILITY = 8, 0

# The components that attention is chosen by: one on the CPU, two on CUDA.
ATTENTION = ("attention", "decode_attention", "prefill_attention")

# Most rows that Weft's own product takes in place of cuBLAS, by its name as a candidate.
FEW_ROWS: Mapping[str, int] = {"triton": 8, "triton-2": 2, "cublas": 0}

_STORAGES: Mapping[str, WeightStorage] = {"none": "bfloat16", "int8": "int8", "int4": "int4"}
"""How the CPU's kernels keep matrices, by the option."""

_NO_TRITON = "{} {} needs Triton and a C compiler, which it runs at start-up"
_NOT_NATIVE = "{} {} needs Weft's native kernels, and they were not compiled or cannot compute this model"
_NOT_DETERMINISTIC = (
    "deterministic is for Weft's own {}, and there is none for this model here: on a CPU it needs dtype bfloat16 and "
    "the compiled kernels, on CUDA Triton"
)


def choose_kernels(model: ModelConfig, config: EngineConfig) -> LayerKernels:
    """Weft's own layers if they can compute the model, native on the CPU and Triton on CUDA, else torch's.

    Raises:
        ModelError: The layers that are named, quantized matrices, or deterministic results, which only Weft's own
            layers have, are not possible for this model here.
    """
    named = config.kernels.get("layers")
    native = library.load() if named != "torch" and supports_layers(model, config.dtype, config.device) else None
    if named == "native" and not native:
        raise ModelError(_NOT_NATIVE.format("layers", named))
    is_read = config.options.load_format != "dummy"  # random weights are in no groups
    if native:
        return CpuKernels(native, _STORAGES[config.options.quantization], model.quantization if is_read else None)
    products = config.kernels.get("packed_products") or packed_products(model, config)[0]
    if config.options.quantization != "none" and not has_triton(config.device):
        lacks = _NOT_NATIVE if config.device.type == "cpu" else _NO_TRITON
        raise ModelError(lacks.format("quantization", config.options.quantization))
    if config.options.quantization != "none" and products == "torch":
        raise ModelError(f"quantization {config.options.quantization} needs packed_products triton, got torch")
    by_torch = [name for name in ("experts", "adapters") if config.kernels.get(name) == "torch"]
    by_torch += ["layers"] * (config.device.type == "cpu")
    if config.options.deterministic and by_torch:
        raise ModelError(_NOT_DETERMINISTIC.format(by_torch[0]))
    if has_triton(config.device):
        from weft.engine.kernels.triton.layer_kernels import TritonKernels  # not installed without CUDA

        return TritonKernels(
            config.options.deterministic,
            storage=config.options.quantization,
            quantization=model.quantization if products != "torch" and is_read else None,
            has_fp8_products=products == "triton-fp8",
            experts=config.kernels.get("experts"),
            few_rows=FEW_ROWS[config.kernels.get("few_row_products", "cublas")],
            is_dependent=is_dependent(config),
            has_own_heads=not _is_attention_by_torch(config),
            has_own_norms=config.kernels.get("norm_and_activation") != "torch",
        )
    if config.kernels.get("norm_and_activation") == "triton":
        raise ModelError(_NO_TRITON.format("norm_and_activation", "triton"))
    return torch_kernels(config.device, config.dtype, config.options.deterministic)


def choose_host_kernels(model: ModelConfig, config: EngineConfig) -> LayerKernels:
    """What computes experts in host memory: what a CPU alone would compute them with.

    Raises:
        ModelError: The CPU has no kernels for quantized matrices or deterministic results of this model.
    """
    return choose_kernels(model, replace(config, device=torch.device("cpu"), kernels={}))


def packed_products(model: ModelConfig, config: EngineConfig) -> tuple[str, ...]:
    """What may multiply packed matrices on CUDA, the preferred one first; torch if they have to be plain."""
    if config.dtype == torch.float32:
        return ("torch",)
    stored = model.quantization if config.options.quantization == "none" else None
    is_made_for_fp8 = stored is not None and stored.has_fp8_activations and not config.options.deterministic
    return ("triton-fp8", "triton") if is_made_for_fp8 and has_fp8(config.device) else ("triton",)


def choose_linear_kernels(config: EngineConfig) -> LayerKernels | None:
    """Weft's own matrices on the CPU, for a model whose other layers are not Weft's; None if they cannot serve it."""
    is_served = config.device.type == "cpu" and config.dtype == torch.bfloat16
    native = library.load() if is_served else None
    return CpuKernels(native) if native else None


def choose_adapters(
    model: ModelConfig, config: EngineConfig, kernels: LayerKernels, whole: DecoderSpec, part: DecoderSpec
) -> Adapters | None:
    """The slots for adapters of what this process computes of a model; None if there shall be none.

    Raises:
        ModelError: The limits cannot be kept.
    """
    options = config.options
    if not options.max_loras:
        return None
    if model.encoder is not None:
        message = f"max_loras is not supported by a model with an encoder and a decoder, got {options.max_loras}"
        raise ModelError(message)
    if not 1 <= options.max_lora_rank <= MAX_RANK:
        raise ModelError(f"max_lora_rank must be 1 to {MAX_RANK}, got {options.max_lora_rank}")
    targets = Targets(model, config.model, whole, part)
    limits = options.max_loras, options.max_lora_rank, _kept_rank(config, kernels)
    num_saved = min(options.lora_modules_to_save, options.max_loras)
    saved = SavedLimits(num_saved, _head_maker(kernels)) if num_saved else None
    return Adapters(targets, *limits, config.device, config.dtype, _site_maker(config, kernels), saved)


def _head_maker(kernels: LayerKernels) -> MakeHead:
    native = library.load() if isinstance(kernels, CpuKernels) else None
    if native:
        return lambda weight: NativeLinear(native, weight, None, is_beside_steps=True).to_float32
    return lambda weight: kernels.router(weight, None).to_float32


def _kept_rank(config: EngineConfig, kernels: LayerKernels) -> int:
    """What the sites of `_site_maker` pad the largest rank to."""
    rank = config.options.max_lora_rank
    if isinstance(kernels, CpuKernels):
        return rank + -rank % PANEL
    return max(1 << (rank - 1).bit_length(), 16) if _is_by_triton(config) else rank


def _site_maker(config: EngineConfig, kernels: LayerKernels) -> MakeSite:
    options = config.options
    native = library.load() if isinstance(kernels, CpuKernels) else None
    if native:
        memory = AdapterMemory()
        return lambda ref, count, size: NativeSite(native, memory, ref.in_features, options.max_loras, size)
    if _is_by_triton(config):
        from weft.engine.kernels.triton.products import TritonSite  # not installed without CUDA

        limits = options.max_loras, options.max_lora_rank

        def make(ref: WeightRef, num_deltas: int, num_bytes: int) -> Site:
            sizes = ref.out_features, ref.in_features
            return TritonSite(sizes, num_deltas, *limits, config.dtype, config.device)

        return make
    return lambda ref, count, size: TorchSite(size)


def _is_by_triton(config: EngineConfig) -> bool:
    return config.kernels.get("adapters") != "torch" and has_triton(config.device)


def make_caches(
    groups: tuple[CacheGroup[CacheSpec], ...],
    num_blocks: int,
    config: EngineConfig,
    num_heads: int,
    num_states: int | None = None,
    scales: Mapping[int, torch.Tensor] | None = None,
) -> Caches:
    """A backend for each kind of cache that a model keeps; see `make_backend`.

    Args:
        num_states: States that there is room for; None means one for each request that may run.
        scales: See `TritonBackend`; only of an fp8 cache.

    Raises:
        ModelError: K and V cannot be kept in the dtype that is asked for.
    """
    check_cache(groups, config)
    states = {index: CacheGroup(g.spec, g.layers) for index, g in enumerate(groups) if isinstance(g.spec, StateSpec)}
    has_input = any(group.spec.num_input_tokens for group in groups)
    is_of_module = any(isinstance(group.spec, ModuleCache) for group in groups)
    mutual = frozenset(layer for group in groups if group.spec.num_mutual for layer in group.layers)
    return Caches(
        ContextBackend(num_blocks)
        if is_of_module
        else make_backend(paged_groups(groups), num_blocks, config, num_heads, scales),
        StateCache(states, num_states or config.max_num_seqs, config.device) if states else None,
        EncoderCaches(config.block_size, config.device) if has_input else None,
        MutualCaches(mutual, config.device) if mutual else None,
    )


def make_backend(
    groups: PagedGroups,
    num_blocks: int,
    config: EngineConfig,
    num_heads: int,
    scales: Mapping[int, torch.Tensor] | None = None,
) -> AttentionBackend:
    """Weft's own attention if it can serve the cache, else the reference; allocates the cache.

    Args:
        num_heads: Query heads of the layers whose specs name none.
        scales: See `make_caches`.

    Raises:
        ModelError: The attention that is named, an fp8 cache, or deterministic results, which only Weft's own attention
            has, are not possible for this cache here.
    """
    cache = (groups, num_blocks, config.block_size, config.dtype, config.device)
    by_torch = _is_attention_by_torch(config)
    if has_triton(config.device) and not by_torch:
        from weft.engine.kernels.triton.attention import TritonBackend  # not installed without CUDA
        from weft.engine.kernels.triton.attention_tiles import BatchLimits

        prompts = _prompt_library(groups, config, num_heads)
        return TritonBackend(
            *cache,
            num_heads=num_heads,
            limits=BatchLimits(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len),
            cache_dtype=config.kv_cache_dtype,
            is_deterministic=config.options.deterministic,
            is_dependent=is_dependent(config),
            tiles=None if config.options.deterministic else _tiles(config, prompts),
            prompts=prompts,
            scales=scales,
        )
    if config.rounded_kv == torch.float8_e4m3fn:
        raise ModelError(_NO_TRITON.format("kv_cache_dtype", "fp8"))
    can = supports_attention(groups, config.block_size, config.dtype, config.device, config.kv_cache_dtype)
    native = library.load() if can and not by_torch else None
    if native:
        return NativeBackend(*cache, native, config.kv_cache_dtype)
    check_cache(groups, config)
    for component in ATTENTION:
        named = config.kernels.get(component, "torch")
        if named != "torch" and not by_torch:
            raise ModelError((_NOT_NATIVE if named == "native" else _NO_TRITON).format(component, named))
    if config.options.deterministic:
        raise ModelError(_NOT_DETERMINISTIC.format("attention"))
    return SdpaBackend(*cache)


def check_cache(groups: Sequence[CacheGroup[CacheSpec]], config: EngineConfig) -> None:
    """Refuse a dtype of K and V that would not be kept. Raises ModelError."""
    if config.rounded_kv and any(isinstance(group.spec, ModuleCache) for group in groups):
        asked = config.options.kv_cache_dtype
        message = f"kv_cache_dtype {asked} is not for this model, whose module of transformers keeps K and V itself"
        raise ModelError(message)
    if config.rounded_kv != torch.int8:
        return
    paged = paged_groups(groups)
    if any(group.spec.latent_dim is not None for group in paged):
        raise ModelError("kv_cache_dtype int8 is not for latent attention, which this model has")
    can = supports_attention(paged, config.block_size, config.dtype, config.device, config.kv_cache_dtype)
    if not can or _is_attention_by_torch(config) or not library.load():
        raise ModelError(_NOT_NATIVE.format("kv_cache_dtype", "int8"))


def _is_attention_by_torch(config: EngineConfig) -> bool:
    """Whether torch attends. Its attention has a cache of its own, so it computes decodes and prompts, or neither."""
    return "torch" in (config.kernels.get(name) for name in ATTENTION)


def _prompt_library(groups: PagedGroups, config: EngineConfig, num_heads: int) -> PromptAttention | None:
    """The library that is named for prompts; None leaves them to Weft's kernel.

    Raises:
        ModelError: It cannot compute the prompts of this model.
    """
    named = config.kernels.get("prefill_attention")
    make = installed_libraries(config.device).get(named) if named else None
    if make is None:
        return None
    library, cache = make(), (config.dtype, config.kv_cache_dtype, config.block_size, config.device)
    if config.options.deterministic:
        raise ModelError(f"prefill_attention {library.name} is not deterministic")
    has_latents = any(group.spec.latent_dim is not None for group in groups)
    if has_latents or not all(map(library.supports, prompt_layers(groups, num_heads, *cache))):
        raise ModelError(f"prefill_attention {library.name} needs {library.needs}")
    return library


def _tiles(config: EngineConfig, prompts: PromptAttention | None) -> TileNames:
    """The named tiles; where a library takes the prompts, its name is no tile."""
    decode = config.kernels.get("decode_attention")
    return TileNames(decode, None if prompts else config.kernels.get("prefill_attention"))


def choose_sampling(config: EngineConfig) -> SamplingKernels:
    """Weft's own sampler, native on the CPU, Triton with its own penalties on CUDA, else torch's.

    Raises:
        ModelError: The sampler that is named is not possible here.
    """
    device, named = config.device, config.kernels.get("sampler")
    if named == "torch":
        return TORCH_SAMPLING
    if has_triton(device):
        from weft.engine.kernels.triton.sampling import TritonSampler  # not installed without CUDA
        from weft.engine.kernels.triton.sampling_rows_jit import apply_penalties as triton_penalties

        return SamplingKernels(triton_penalties, TritonSampler())
    native = library.load() if device.type == "cpu" else None
    if named and not native:
        raise ModelError((_NOT_NATIVE if named == "native" else _NO_TRITON).format("sampler", named))
    return SamplingKernels(apply_penalties, NativeSampler(native)) if native else TORCH_SAMPLING


def choose_graph_sampler(config: EngineConfig, vocab_size: int) -> GraphSampler | None:
    """A sampler for CUDA graphs with the results of `choose_sampling`; None if graphs can only sample greedily."""
    if not has_triton(config.device) or config.kernels.get("sampler") == "torch":
        return None
    from weft.engine.kernels.triton.sampling import TritonGraphSampler  # not installed without CUDA

    return TritonGraphSampler(vocab_size)


def set_num_threads(kernels: LayerKernels | None, caches: Caches, sampling: SamplingKernels, number: int) -> None:
    """Set how many threads share the work of a model's layers, attention and sampler.

    kernels is None if transformers' module has its own.

    If layers and attention are Weft's own, torch gets one thread for the little that it still does. Its threads spin
    for about 20 ms after each operation, on the cores that Weft's threads need. But an encoder attends by torch.
    """
    are_native = isinstance(kernels, CpuKernels), isinstance(caches.attention, NativeBackend)
    if (any(are_native) or isinstance(sampling.pick_ids, NativeSampler)) and (native := library.load()):
        native.set_num_threads(number)
    torch.set_num_threads(1 if all(are_native) and not caches.encoder else number)


def is_dependent(config: EngineConfig) -> bool:
    """Whether kernels start while the one before them still runs; see `dependent_launch`."""
    return config.kernels.get("launches") == "early"


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
