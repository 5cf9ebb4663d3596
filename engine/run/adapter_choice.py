"""Chooses what computes the adapters of a model, and plans their memory, before the model is loaded."""

from weft.engine.config import EngineConfig
from weft.engine.describe.specs import DecoderSpec
from weft.engine.kernels.cpu import adapters as native_adapters
from weft.engine.kernels.cpu import library
from weft.engine.kernels.cpu.layers import NativeLinear
from weft.engine.kernels.cpu.native_kit import NativeKit
from weft.engine.kernels.cpu.packed import PANEL
from weft.engine.kernels.torch.adapters import TorchSite
from weft.engine.layers.kit import LayerKit
from weft.engine.lora.adapters import Adapters, MakeSite
from weft.engine.lora.saved_modules import MakeHead, SavedLimits
from weft.engine.lora.step_rows import Site
from weft.engine.lora.targets import Targets
from weft.engine.models.config import ModelConfig
from weft.engine.run.kernel_choice import has_triton
from weft.engine.shared.errors import ModelError
from weft.engine.weights.refs import WeightRef


def choose_adapters(
    model: ModelConfig, config: EngineConfig, kit: LayerKit, whole: DecoderSpec, part: DecoderSpec
) -> Adapters | None:
    """The slots for adapters of what this process computes of a model; None if there shall be none.

    Raises:
        ModelError: The limits cannot be kept.
    """
    options = config.options
    if not options.max_loras:
        return None
    if not 1 <= options.max_lora_rank <= native_adapters.MAX_RANK:
        raise ModelError(f"max_lora_rank must be 1 to {native_adapters.MAX_RANK}, got {options.max_lora_rank}")
    targets = Targets(model, config.model, whole, part)
    limits = options.max_loras, options.max_lora_rank, _kept_rank(config, kit)
    num_saved = min(options.lora_modules_to_save, options.max_loras)
    saved = SavedLimits(num_saved, _head_maker(kit)) if num_saved else None
    return Adapters(targets, *limits, config.device, config.dtype, _site_maker(config, kit), saved)


def _head_maker(kit: LayerKit) -> MakeHead:
    native = library.load() if isinstance(kit, NativeKit) else None
    if native:
        return lambda weight: NativeLinear(native, weight, None, is_beside_steps=True).to_float32
    return lambda weight: kit.router(weight, None).to_float32


def _kept_rank(config: EngineConfig, kit: LayerKit) -> int:
    """What the sites of `_site_maker` pad the largest rank to."""
    rank = config.options.max_lora_rank
    if isinstance(kit, NativeKit):
        return rank + -rank % PANEL
    return max(1 << (rank - 1).bit_length(), 16) if _is_by_triton(config) else rank


def _site_maker(config: EngineConfig, kit: LayerKit) -> MakeSite:
    options = config.options
    native = library.load() if isinstance(kit, NativeKit) else None
    if native:
        memory = native_adapters.AdapterMemory()
        return lambda ref, count, size: native_adapters.NativeSite(
            native, memory, ref.in_features, options.max_loras, size
        )
    if _is_by_triton(config):
        from weft.engine.kernels.triton.adapters import TritonSite  # not installed without CUDA

        limits = options.max_loras, options.max_lora_rank

        def make(ref: WeightRef, num_deltas: int, num_bytes: int) -> Site:
            sizes = ref.out_features, ref.in_features
            return TritonSite(sizes, num_deltas, *limits, config.dtype, config.device)

        return make
    return lambda ref, count, size: TorchSite(size)


def _is_by_triton(config: EngineConfig) -> bool:
    return config.kernels.get("adapters") != "torch" and has_triton(config.device)
