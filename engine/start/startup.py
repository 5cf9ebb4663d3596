"""Builds an engine that can step: config, weights, measured memory plan, cache, warm-up.

The order matters. Weights are loaded first. Then a step is measured, and the KV cache takes what is really left.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace as replace_fields

from weft.engine import config as engine_config
from weft.engine.cache.block_bytes import BlockBytes, RankedBlocks
from weft.engine.cache.events import BlockEvents, RecordingCache
from weft.engine.cache.manager import KVCacheManager
from weft.engine.cache.offload import OffloadTier, Opened, open_tier
from weft.engine.cache.specs import CacheGroup, CacheSpec, ModuleCache, group_layers
from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelFacts
from weft.engine.drafts import NgramDrafter, PredictionDrafter
from weft.engine.guidance.compiler import GrammarCompiler, load_vocabulary
from weft.engine.kernels.choice import choose_graph_sampler, choose_sampling, make_caches, set_num_threads
from weft.engine.kernels.torch.caches import Caches
from weft.engine.layers.block import Decoder, LoadedModel
from weft.engine.loop.engine import Engine
from weft.engine.loop.grammars import MaskComputer, PendingGrammars
from weft.engine.loop.output_collector import ForcedTokens
from weft.engine.loop.sight import Sight
from weft.engine.lora.adapters import Adapters
from weft.engine.memory_plan import MemoryPlan
from weft.engine.ranks.ranked_runner import RankedRunner
from weft.engine.ranks.ranks import Ranks, share_cores
from weft.engine.runner.cuda_graphs import StepGraphs
from weft.engine.runner.model_runner import LaunchedStep, ModelRunner
from weft.engine.sampling.sampler import SamplingKernels
from weft.engine.schedule.scheduler import ScheduledStep, Scheduler
from weft.engine.schedule.speculator import Drafter
from weft.engine.schedule.step_cost import StepCostModel
from weft.engine.start.draft_head import find_draft, make_head, read_served
from weft.engine.start.draft_model import DraftCheckpoint, DraftModel, SmallSteps
from weft.engine.start.eyes import input_limits, load_eyes
from weft.engine.start.model_choice import load_planned, plan_model, weights_note
from weft.engine.start.sizes import find_sizes
from weft.engine.start.vector_model import find_task, read_alignment, read_vector_model
from weft.engine.start.warm_up import plan_memory, record_graphs, warm_up
from weft.engine.tune.components import tune_kernels, tuner_for
from weft.engine.vision.eyes import Eyes
from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import format_size
from weft.engine.wire.messages import EngineInfo, EngineOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that is ready, its description, and what it runs with.

    Attributes:
        tier: What keeps evicted blocks, if anything does.
    """

    engine: Engine[LaunchedStep]
    info: EngineInfo
    plan: MemoryPlan
    config: EngineConfig
    tier: OffloadTier | None = None

    @property
    def events(self) -> BlockEvents | None:
        """Of blocks that became cached; None if nobody asked for them."""
        kv = self.engine.scheduler.kv
        return kv.events if isinstance(kv, RecordingCache) else None


def start(
    options: EngineOptions,
    epoch: str,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    show_missing: Callable[[int], None] = lambda num_machines: None,
    before_launch: Callable[[ScheduledStep], None] = lambda step: None,
) -> Started:
    """Load the model and build the engine around it.

    Args:
        progress: Called with bytes loaded and bytes in all.
        show_missing: Called with the number of machines that have not joined yet, when it changes.

    Raises:
        ModelError: The model cannot be loaded or does not fit; one line fit for the user.
    """
    task = find_task(Path(options.model), options.task, engine_config.settings_of_ranks(options))
    model_config = read_served(options, task.max_num_tokens)
    config = engine_config.resolve(options, model_config)
    share_cores(config)
    config = tune_kernels(model_config, _fitted(model_config, config), tuner := tuner_for(config.device))
    chosen = plan_model(model_config, config)
    settle_draft = partial(tune_kernels, tuner=tuner, is_draft=True)
    draft = find_draft(config, model_config, chosen, settle_draft)
    torch.set_grad_enabled(False)
    ranks = Ranks(config, show_missing) if options.num_ranks > 1 else None
    chosen, model = load_planned(chosen, config.model, progress)
    drafter = draft.plan.load(config.draft_model, lambda done, total: None) if draft and config.draft_model else None
    eyes = load_eyes(model, model_config, config, ranks)
    plan = plan_memory(model, model_config, config, chosen, draft, ranks)
    config = replace(config, max_num_seqs=plan.max_num_seqs)
    sizes, scales = (plan.num_blocks, config, model_config.num_heads, plan.num_states), chosen.kv_scales(config.model)
    caches = make_caches(chosen.groups, *sizes, scales)
    logger.info("layers: %s; attention: %s", chosen.name, caches.name)
    draft_caches = _draft_caches(draft, plan, config.draft_model) if draft and config.draft_model else None
    note, sampling = weights_note(model_config, config, chosen.kernels), choose_sampling(config)
    weights = note and note + "; K and V have scales" * bool(scales)
    offload = _open_offload(config, plan, chosen.groups, caches, draft, draft_caches, ranks, weights)
    kv = _cache_manager(config, plan, chosen.groups, offload)
    draft_model = _draft_model(draft, (drafter, model), draft_caches, sampling, kv, model_config.short_context)
    graphs = None if ranks else _graphs(model, caches, config, model_config.vocab_size, draft_model)
    runner = _runner(model, caches, config, draft_model, sampling, chosen.adapters, ranks or graphs, eyes)
    cost, share_among = StepCostModel(), partial(set_num_threads, chosen.kernels, caches, sampling)
    num_threads = warm_up(runner, cost, config, plan, kv.specs, tuner, share_among)
    record_graphs(runner, graphs)
    vectors = read_vector_model(Path(options.model), task, model_config, options)
    alignment = None if ranks else read_alignment(Path(options.model), model_config)
    engine = Engine(
        _scheduler(config, kv, cost, offload, model_config.short_context),
        runner,
        vocab_size=model_config.vocab_size,
        max_model_len=plan.max_model_len,
        max_num_waiting=config.options.max_num_waiting,
        input_limits=input_limits(plan, model_config, config),
        max_loras=options.max_loras,
        lora_modules_to_save=options.lora_modules_to_save,
        eos_token_ids=model_config.eos_token_ids,
        overlap=config.overlap,
        grammars=_grammars(config, model_config),
        masks=MaskComputer(model_config.vocab_size),
        drafters=_drafters(config, kv.can_copy, draft),
        draft_model=_serving(draft_model),
        vectors=vectors or alignment,
        sight=partial(Sight, features=eyes, check_device=runner.check_device, room_bytes=chosen.kept_bytes),
        before_launch=before_launch,
    )
    info = _info(epoch, model_config, config, plan, caches.name, num_threads)
    info = replace_fields(info, task=task.name, vectors=vectors.info if vectors else None, aligns=alignment is not None)
    return Started(engine, info, plan, config, offload.tier if offload else None)


def _runner(
    model: LoadedModel,
    caches: Caches,
    config: EngineConfig,
    draft_model: SmallSteps | None,
    sampling: SamplingKernels,
    adapters: Adapters | None,
    means: Ranks | StepGraphs | None,
    eyes: Eyes | None,
) -> ModelRunner:
    parts = model, caches, config.device, draft_model, sampling
    if isinstance(means, Ranks):
        return RankedRunner(means, *parts, adapters, eyes, overlap=config.overlap)
    return ModelRunner(*parts, means, adapters, eyes)


def _grammars(config: EngineConfig, model_config: ModelFacts) -> PendingGrammars:
    vocabulary = partial(load_vocabulary, config.model, model_config.vocab_size, model_config.eos_token_ids)
    return PendingGrammars(GrammarCompiler(vocabulary))


def _fitted(model_config: ModelFacts, config: EngineConfig) -> EngineConfig:
    """Refuse what cannot fit before anything is tried or loaded; what is settled later changes no size.

    Returns:
        The config with the decision which experts stay in host memory.
    """
    sizes = find_sizes(model_config, replace(config, kernels={}))
    sizes.check_fit()
    if (host := sizes.chosen.host).num_layers:
        device, moved = format_size(sizes.weights_bytes), format_size(host.num_bytes)
        told = "%s stay in host memory: weights take %s of the device and %s of the host; no CUDA graphs are used"
        logger.info(told, host.whose, device, moved)
    return replace(sizes.config, kernels=config.kernels)


def _draft_caches(draft: DraftCheckpoint, plan: MemoryPlan, folder: Path) -> Caches:
    sizes = plan.num_blocks, draft.engine_config, draft.config.num_heads
    return make_caches(draft.groups, *sizes, scales=draft.plan.kv_scales(folder))


def _draft_model(
    draft: DraftCheckpoint | None,
    models: tuple[LoadedModel | None, LoadedModel],
    caches: Caches | None,
    sampling: SamplingKernels,
    kv: KVCacheManager,
    short_context: int,
) -> SmallSteps | None:
    """A runner of its own around the first of the models, which drafts for the second, if there is one."""
    model, served = models
    if draft is None or model is None or caches is None:
        return None
    shares_tables, config = draft.config.short_context == short_context, draft.engine_config
    if draft.is_head:
        return make_head(draft, (model, served), caches, sampling, kv, shares_tables=shares_tables)
    graphs = _graphs(model, caches, config, draft.config.vocab_size, None)
    runner = ModelRunner(model, caches, config.device, sampling=sampling, graphs=graphs)
    return DraftModel(runner, kv, draft.group_indices, config.max_num_batched_tokens, shares_tables=shares_tables)


def _serving(draft_model: SmallSteps | None) -> SmallSteps | None:
    """What drafts; a draft model computes from now on only what drafts need."""
    if isinstance(draft_model, DraftModel):
        draft_model.is_serving = True
    return draft_model


def _open_offload(
    config: EngineConfig,
    plan: MemoryPlan,
    groups: tuple[CacheGroup[CacheSpec], ...],
    caches: Caches,
    draft: DraftCheckpoint | None,
    draft_caches: Caches | None,
    ranks: Ranks | None,
    weights: str | None,
) -> Opened | None:
    """What keeps evicted blocks, of the model and of a head, whose caches have the same block ids.

    A draft model computes again what its cache lacks.

    Args:
        weights: How a quantized checkpoint has its weights, how they are kept, and whether it has scales for the
            cache; None for other checkpoints.
    """
    if not (config.options.kv_offload or config.options.kv_offload_dir):
        return None
    if not _caches_prefixes(config, plan) or any(isinstance(group.spec, ModuleCache) for group in groups):
        raise ModelError("kv_offload and kv_offload_dir keep cached prefixes, and this engine caches none")
    tensors = caches.blocks(groups)
    shared = [len(of_group) for of_group in tensors]
    if draft and draft_caches and draft.is_head:
        for index, of_draft in zip(draft.group_indices, draft_caches.blocks(draft.groups), strict=True):
            tensors[index] += of_draft
    options = config.options
    facts = (
        *(config.dtype, config.kv_cache_dtype, options.quantization, options.load_format, options.model_impl),
        *(config.block_size, plan.max_model_len, caches.name, groups, weights, options.tensor_parallel_size),
    )
    device = config.device
    blocks = RankedBlocks(tensors, shared, device, ranks.send_each) if ranks else BlockBytes(tensors, device)
    return open_tier(options, blocks, facts)


def _caches_prefixes(config: EngineConfig, plan: MemoryPlan) -> bool:
    return config.options.prefix_caching and (plan.num_kept_states > 0 or not plan.states_bytes)


def _cache_manager(
    config: EngineConfig, plan: MemoryPlan, groups: tuple[CacheGroup[CacheSpec], ...], offload: Opened | None
) -> KVCacheManager:
    manager = RecordingCache if config.options.kv_events else KVCacheManager
    kv = manager(
        plan.num_blocks,
        config.block_size,
        [group.spec for group in groups],
        _caches_prefixes(config, plan),
        max_num_pinned_blocks=int(config.options.pin_share * (plan.num_blocks - 1)),
        num_states=plan.num_states,
        tier=offload.tier if offload else None,
        hash_key=offload.hash_key if offload else None,
    )
    if isinstance(kv, RecordingCache) and kv.events is None:
        raise ModelError("kv_events tells which blocks are cached, and this engine caches none")
    return kv


def _scheduler(
    config: EngineConfig, kv: KVCacheManager, cost: StepCostModel, offload: Opened | None, short_context: int
) -> Scheduler:
    return Scheduler(
        kv,
        cost,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        itl_target_s=config.itl_target_s,
        is_ahead=config.overlap,
        short_context=short_context,
        counters=offload.tier.counters if offload else None,
    )


def _graphs(
    model: LoadedModel, caches: Caches, config: EngineConfig, vocab_size: int, follower: SmallSteps | None
) -> StepGraphs | None:
    # Transformers' modules may wait for the device, and experts in host memory do.
    if not caches.supports_graphs or not isinstance(model, Decoder) or config.num_host_layers:
        return None
    return StepGraphs(
        model,
        caches,
        config.device,
        [group.spec for group in group_layers(model.cache_specs)],
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        samples=follower is None or not follower.launches,
        sampler=choose_graph_sampler(config, vocab_size),
    )


def _drafters(config: EngineConfig, can_draft: bool, draft: DraftCheckpoint | None) -> list[Drafter]:
    """Sources of drafts, the best first: a grammar's ids are certain, and callers know more than repetition.

    Raises:
        ModelError: Drafts are asked for, but the cache is an object of a module, which cannot go back behind them.
    """
    if not can_draft:
        if config.is_ngram:
            raise ModelError("speculative ngram needs caches that can go back behind a refused draft")
        return []
    sources = [draft.name] if draft else ["ngram"] * config.is_ngram
    logger.info("speculation: %s", ", ".join(["predictions of the callers", *sources]))
    return [ForcedTokens(), PredictionDrafter(), *([NgramDrafter()] if config.is_ngram else [])]


def _info(
    epoch: str, model_config: ModelFacts, config: EngineConfig, plan: MemoryPlan, attention: str, num_threads: int
) -> EngineInfo:
    limits = input_limits(plan, model_config, config)
    return EngineInfo(
        epoch=epoch,
        architecture=model_config.architecture,
        vocab_size=model_config.vocab_size,
        max_model_len=plan.max_model_len,
        eos_token_ids=model_config.eos_token_ids,
        device=_device_name(config, num_threads),
        dtype=str(config.dtype).removeprefix("torch."),
        attention_backend=attention,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_input=limits.longest,
        max_own=limits.own,
        audio=limits.audio,
        picture_token=limits.picture_token,
        kv_role=config.options.kv_role,
    )


def _device_name(config: EngineConfig, num_threads: int) -> str:
    device, size = config.device, config.options.num_ranks
    name = f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else f"cpu ({num_threads} threads)"
    return name if size == 1 else f"{name}, {size} ranks"
