"""Chooses what computes a model: Weft's own decoder if there is a family for it, else transformers' module.

Both are described before anything is loaded, and transformers is imported only for its own modules.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from weft.engine.cache.specs import CacheGroup, CacheSpec, StateSpec, group_layers
from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelConfig, ModelFacts, native_config
from weft.engine.describe.cut import Cut
from weft.engine.describe.specs import DecoderSpec
from weft.engine.families.registry import identify
from weft.engine.fields import Fields, understood
from weft.engine.host_memory import ALL_ON_DEVICE, HostShare
from weft.engine.kernels.choice import (
    check_cache,
    choose_adapters,
    choose_host_kernels,
    choose_kernels,
    choose_linear_kernels,
)
from weft.engine.kernels.host_experts import HostedKernels
from weft.engine.layers.block import Decoder, LoadedModel
from weft.engine.layers.kernels import LayerKernels
from weft.engine.lora.adapters import AdaptedKernels, Adapters
from weft.engine.memory_plan import num_positions
from weft.engine.models.cut import Stage, find_stages, largest_groups, shard
from weft.engine.models.loading import lacks_head, load_weights, read_kv_scales
from weft.engine.parts.decoder import decoder_spec
from weft.engine.parts.experts import ExpertsSpec
from weft.engine.vision.attended import kept_bytes
from weft.engine.vision.checkpoint import read_vision, served_vision
from weft.engine.weights.reader import Progress
from weft.engine.wire.errors import ModelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What will compute a model.

    Attributes:
        name: Of the layers, for the log.
        kernels: What makes the layers, or only the matrices of transformers' module; None if that has its own.
        cache_specs: What each cache will keep.
        groups: The groups of caches; those of a pipeline stage are the groups of all stages, with its own layers.
        planned_groups: By which memory is planned: with as many layers as any stage has.
        weights_bytes: Memory that the weights will take.
        adapters: The slots for adapters, which get their places in the model when it is loaded; None for none.
        adapters_bytes: Memory that they take if all are in use, of weights_bytes.
        experts_bytes: What the experts of each layer that has some take where they are on the device.
        host: Those that are not, which are no part of weights_bytes.
        vision_bytes: Memory of what sees, with what it keeps of pictures, of weights_bytes.
        kept_bytes: That which it keeps, of vision_bytes.
        encoding_bytes: Memory that it needs besides while it encodes a large picture, between two steps.
        load: Loads the weights in a folder; raises ModelError if they do not fit.
        kv_scales: Reads what the folder has for an fp8 cache; see `read_kv_scales`.
    """

    name: str
    kernels: LayerKernels | None
    cache_specs: tuple[CacheSpec, ...]
    weights_bytes: int
    load: Callable[[Path, Progress], LoadedModel]
    groups: tuple[CacheGroup[CacheSpec], ...]
    planned_groups: tuple[CacheGroup[CacheSpec], ...]
    adapters: Adapters | None = None
    adapters_bytes: int = 0
    experts_bytes: tuple[int, ...] = ()
    host: HostShare = ALL_ON_DEVICE
    vision_bytes: int = 0
    kept_bytes: int = 0
    kv_scales: Callable[[Path], Mapping[int, torch.Tensor]] = lambda folder: {}
    encoding_bytes: int = 0


def read_model(folder: Path, model_impl: str, max_num_tokens: int | None = None) -> ModelFacts:
    """Read the configuration of a model folder in Hugging Face layout.

    Args:
        model_impl: auto, native or transformers.
        max_num_tokens: A tighter bound on the context than that of config.json; None for none.

    Raises:
        ModelError: A file is missing or malformed, or the model cannot be served this way.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    identity = identify(folder, model_impl)
    outer = Fields.read(folder / "config.json")
    vision = read_vision(folder, outer) if identity.switches is not None else None
    if vision is None and any(outer.has(name) for name in ("text_config", "vision_config", "audio_config")):
        logger.warning("only text is served: images and sounds are not read")
    if identity.switches is not None:
        facts: ModelFacts = native_config(folder, identity)
        if isinstance(facts, ModelConfig) and identity.architecture not in outer.texts("architectures"):
            is_tied = facts.tie_word_embeddings or lacks_head(folder, facts)  # a half may tie without a word of it
            facts = replace(facts, tie_word_embeddings=is_tied)
    else:
        from weft.engine.fallback.config import load_fallback_config  # imports transformers

        facts = load_fallback_config(folder, identity)
    longest = min(facts.max_position_embeddings, max_num_tokens or facts.max_position_embeddings)
    return replace(facts, max_position_embeddings=longest, vision=vision)


def plan_model(model: ModelFacts, config: EngineConfig) -> ModelPlan:
    """Decide what computes a model that `read_model` returned.

    Raises:
        ModelError: The options ask for what only another way of computing the model has.
    """
    options = config.options
    if isinstance(model, ModelConfig):
        num_ranks = options.tensor_parallel_size
        model = replace(model, vision=served_vision(model.vision, options))
        with understood(config.model / "config.json"):
            whole = decoder_spec(model)
        index, rank = divmod(config.rank, num_ranks)
        stages = find_stages(whole, options.pipeline_parallel_size, rank, num_ranks)
        sharded, stage, kernels = shard(whole, rank, num_ranks), stages[index], choose_kernels(model, config)
        spec = stage.cut(sharded)
        _check_keys(whole.caches, config)
        check_cache(group_layers(spec.caches), config)
        adapters = choose_adapters(model, config, kernels, whole, stage.cut(whole))
        layers = [layer for layer in spec.feed_forwards if isinstance(layer, ExpertsSpec)]
        placed_kernels, host = _place_experts(model, config, kernels, layers)
        adapted_kernels = AdaptedKernels.around(placed_kernels, adapters) if adapters else placed_kernels
        adapters_bytes = adapters.planned_bytes(spec) if adapters else 0
        kept = kept_bytes(model, config.dtype, config.device) if model.vision else 0
        vision_bytes = model.vision.num_values * config.dtype.itemsize + kept if model.vision else 0
        return ModelPlan(
            kernels.name,
            kernels,
            spec.caches,
            spec.weights_bytes(placed_kernels, config.dtype) + adapters_bytes + vision_bytes,
            partial(_load_native, model, config, adapted_kernels, num_positions(config, spec.caches), stage),
            stage.groups(sharded),
            largest_groups(sharded, stages),
            adapters,
            adapters_bytes,
            tuple(layer.experts_bytes(kernels, config.dtype) for layer in layers),
            host,
            vision_bytes,
            kept,
            _kv_scales(model, config, stage.cut(whole), spec, Cut(rank, num_ranks, has_sums=True)),
            model.vision.num_encoding_values * config.dtype.itemsize if model.vision else 0,
        )
    for name, is_asked in (
        (f"quantization {options.quantization}", options.quantization != "none"),
        ("deterministic", options.deterministic),
        ("tensor_parallel_size", options.tensor_parallel_size > 1),
        ("pipeline_parallel_size", options.pipeline_parallel_size > 1),
        ("max_loras", options.max_loras > 0),
        ("host_expert_layers", config.num_host_layers > 0),
    ):
        if is_asked:
            raise ModelError(f"{name} needs a native family, and transformers' module computes {model.architecture}")
    from weft.engine.fallback.config import FallbackConfig  # imports transformers
    from weft.engine.fallback.parity import load_compared

    assert isinstance(model, FallbackConfig)
    linear_kernels = choose_linear_kernels(config) if model.is_linear else None
    _check_keys(model.cache_specs, config)
    check_cache(groups := group_layers(model.cache_specs), config)
    products = linear_kernels.name if linear_kernels else "torch"
    return ModelPlan(
        f"transformers, {products}{', request by request' * (model.calls is None)}",
        linear_kernels,
        model.cache_specs,
        model.num_values * config.dtype.itemsize,
        partial(load_compared, model, config, linear_kernels),
        groups,
        groups,
    )


def _place_experts(
    model: ModelConfig, config: EngineConfig, kernels: LayerKernels, layers: Sequence[ExpertsSpec]
) -> tuple[LayerKernels, HostShare]:
    """The kernels with as many layers' experts in host memory as the config says, and what these take there."""
    number, num_all = config.num_host_layers, len(layers)
    if number > num_all:
        counted = f"{num_all}, the number of layers of this model that have experts"
        raise ModelError(f"host_expert_layers must be at most {counted}, got {number}")
    if not number:
        return kernels, ALL_ON_DEVICE
    host, moved = choose_host_kernels(model, config), layers[:number]
    num_bytes = sum(layer.experts_bytes(host, config.dtype) for layer in moved)
    return HostedKernels.around(kernels, host, moved), HostShare(number, num_all, num_bytes, host.name)


def _check_keys(specs: Sequence[CacheSpec], config: EngineConfig) -> None:
    """Refuse a dtype of K and V for a model without any."""
    asked = config.options.kv_cache_dtype
    if config.rounded_kv and all(isinstance(spec, StateSpec) for spec in specs):
        raise ModelError(f"kv_cache_dtype {asked} is for keys and values, and this model has none")


def _kv_scales(
    model: ModelConfig, config: EngineConfig, whole: DecoderSpec, own: DecoderSpec, cut: Cut
) -> Callable[[Path], Mapping[int, torch.Tensor]]:
    """What reads the scales for an fp8 cache, which some quantized checkpoints have."""
    has_some = model.quantization is not None and model.quantization.has_kv_scales
    if config.rounded_kv != torch.float8_e4m3fn or not has_some or config.options.load_format == "dummy":
        return lambda folder: {}
    return partial(read_kv_scales, whole=whole, own=own, cut=cut)


def load_planned(plan: ModelPlan, folder: Path, progress: Progress) -> tuple[ModelPlan, LoadedModel]:
    """Load the model. A module may turn out to need other caches than planned: then the plan names these."""
    model = plan.load(folder, progress)
    if not isinstance(model, Decoder):
        groups = group_layers(model.cache_specs)
        plan = replace(plan, cache_specs=model.cache_specs, groups=groups, planned_groups=groups)
    return plan, model


def plan_largest(model: ModelFacts, config: EngineConfig) -> ModelPlan:
    """As `plan_model`, for the first rank of the pipeline stage whose weights take most memory."""
    ranks = range(0, config.options.num_ranks, config.options.tensor_parallel_size)
    return max((plan_model(model, replace(config, rank=rank)) for rank in ranks), key=lambda plan: plan.weights_bytes)


def weights_note(model: ModelFacts, config: EngineConfig, kernels: LayerKernels | None) -> str | None:
    """How a quantized checkpoint has its weights, and how they are kept in memory; None for other checkpoints."""
    if (
        not isinstance(model, ModelConfig)
        or model.quantization is None
        or kernels is None
        or config.options.load_format == "dummy"
    ):
        return None
    if config.options.quantization != "none":
        kept = f"rounded again, to {config.options.quantization}"
    else:
        quantization, dtype = model.quantization, str(config.dtype).removeprefix("torch.")
        keeps_integers = kernels.keeps_groups and quantization.has_integers
        is_kept = quantization.has_groups if kernels.keeps_floats else keeps_integers
        which = "they lie" if kernels.keeps_floats else "they are integers or fp4"
        how = "in 8 bits" if quantization.rounds_tables else f"so where {which} in groups, else in {dtype}"
        kept = f"kept {how if is_kept else f'in {dtype}'}"
    activations = "quantized in products of many rows" if kernels.rounds_inputs else "not quantized"
    return f"stored as {model.quantization.described(f'activations are {activations}')} and {kept}"


def _load_native(
    model: ModelConfig,
    config: EngineConfig,
    kernels: LayerKernels,
    num_positions: int,
    stage: Stage,
    folder: Path,
    progress: Progress,
) -> LoadedModel:
    note = weights_note(model, config, kernels)
    if note and config.rank == 0:
        logger.info("weights are %s", note)
    return load_weights(
        folder,
        model,
        kernels,
        device=config.device,
        dtype=config.dtype,
        max_model_len=num_positions,
        load_format=config.options.load_format,
        progress=progress,
        stage=stage,
    )
