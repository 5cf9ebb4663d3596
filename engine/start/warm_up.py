"""Runs the first steps before serving.

The largest tells what memory is left; the others settle the number of threads, teach the cost model and become graphs.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from weft.engine import config as engine_config
from weft.engine.batch import Batch
from weft.engine.cache.specs import CacheGroup, CacheSpec
from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelFacts
from weft.engine.kernels.choice import choose_sampling, make_caches
from weft.engine.layers.block import LoadedModel
from weft.engine.memory_plan import MemoryPlan, estimate_activations_bytes, make_plan
from weft.engine.ranks.ranked_runner import FollowingRunner
from weft.engine.ranks.ranks import Ranks, least_of_ranks
from weft.engine.runner.cuda_graphs import StepGraphs
from weft.engine.runner.dummy_batch import dummy_batch, largest_batch
from weft.engine.runner.model_runner import ModelRunner
from weft.engine.schedule.step_cost import StepCostModel, StepLoad
from weft.engine.start.draft_model import DraftCheckpoint
from weft.engine.start.model_choice import ModelPlan
from weft.engine.tune.compare import Tuner
from weft.engine.tune.components import threads

logger = logging.getLogger(__name__)

_GOING_ON_TOKENS = 32
_WARM_UP_TOKENS = (1, 16, 64)
"""Sizes of steps run before serving. The first request does not pay for them, and times can be predicted."""

_CUDA_WARM_UP_TOKENS = (*_WARM_UP_TOKENS, 512, 2048)
"""On CUDA small steps take as long as their launches. They would promise that prompts cost nothing."""

_EAGER_TOKENS = (1, 2, 3)
"""Steps that are no graphs, with adapters or with experts in host memory, have kernels of their own, and so have one
row, two, and a few; a request would wait for them."""

_RECORDING_S = 3.0
"""Time for CUDA graphs before serving, little beside loading. The first ones hold any step, and the first requests are
to have them; the others are recorded when no request runs."""

_SMALL_MODEL_BYTES = 100_000_000
"""Below this size of the weights, one thread may compute a step faster than several, so both are timed. Larger models
always use all threads. Otherwise other load on the machine at that moment could decide for as long as the choice is
kept."""

_COMPARED_ROWS = 16
"""Rows of the step that is timed. With one row, the benchmark's tiny model got one thread, with which 64 streams take
21 ms instead of 12."""


def warm_up(
    runner: ModelRunner,
    cost: StepCostModel,
    config: EngineConfig,
    plan: MemoryPlan,
    specs: Sequence[CacheSpec],
    tuner: Tuner,
    share_among: Callable[[int], None],
) -> int:
    """Settle the number of threads, and give the cost model its first steps.

    Returns:
        The number of threads. `share_among` was called with it.
    """

    def run(batch: Batch) -> None:
        runner.collect(runner.launch(batch))

    def least_s(num_tokens: int) -> float:
        """Seconds of a step, the least of several runs, since the first ones are slow."""
        batch = dummy_batch(num_tokens, specs, config.block_size, 1)
        seconds = []
        for _ in range(2 if num_tokens > 1 else 4):
            began = time.perf_counter()
            result = runner.collect(runner.launch(batch))
            seconds.append(result.device_s or time.perf_counter() - began)
        return min(seconds)

    wanted = _CUDA_WARM_UP_TOKENS if config.device.type == "cuda" else _WARM_UP_TOKENS
    sizes = [min(n, plan.max_model_len, config.max_num_batched_tokens) for n in wanted]
    num_threads = torch.get_num_threads()
    asked = config.options.kernels.get("threads")
    may_choose = config.device.type == "cpu" and num_threads > 1 and config.options.num_ranks == 1
    is_small = may_choose and plan.weights_bytes < _SMALL_MODEL_BYTES
    if is_small or asked:
        num_rows = min(_COMPARED_ROWS, sizes[-1], config.max_num_seqs)
        batch = dummy_batch(num_rows, specs, config.block_size, num_rows)
        parts = [f"{name} {chosen}" for name, chosen in config.kernels.items()]
        shapes = ", ".join([f"{plan.weights_bytes} bytes of weights, {num_rows} rows", *parts])
        component = threads(shapes, num_threads, share_among, partial(run, batch))
        num_threads = int(tuner.tune(component, asked))
    share_among(num_threads)
    if config.device.type == "cuda" and (config.options.max_loras or config.num_host_layers):
        adapters = np.ones(1, np.int64) if config.options.max_loras else None
        for num_tokens in _EAGER_TOKENS:
            run(replace(dummy_batch(num_tokens, specs, config.block_size, num_tokens), adapters=adapters))
    if config.device.type == "cuda":  # continued prompts may have a kernel of their own to compile
        num_tokens = min(_GOING_ON_TOKENS, plan.max_model_len) - 1
        run(dummy_batch(num_tokens, specs, config.block_size, 1, num_cached=1))
    for size in sizes:
        load = StepLoad()
        load.add(size, 0)
        cost.observe(load, least_s(size))
    return num_threads


def record_graphs(runner: ModelRunner, graphs: StepGraphs | None) -> None:
    """Record CUDA graphs of the model, if it has any, then of its draft model, until the time for it is over."""
    if graphs is None:
        return
    began = time.perf_counter()
    while runner.prepare() and time.perf_counter() - began < _RECORDING_S:
        pass
    logger.info("recorded %d of %d CUDA graphs in %.1f s", *graphs.progress, time.perf_counter() - began)


def plan_memory(
    model: LoadedModel,
    model_config: ModelFacts,
    config: EngineConfig,
    chosen: ModelPlan,
    draft: DraftCheckpoint | None,
    ranks: Ranks | None,
) -> MemoryPlan:
    """Divide the memory that the weights leave, of all ranks once they have loaded, which then get the plan."""
    if ranks:
        ranks.join()
    activations_bytes, free_bytes = measure_memory(model, model_config, config, chosen.groups, draft)
    more_bytes = max(chosen.encoding_bytes - activations_bytes, 0)  # a picture is encoded between two steps
    activations_bytes, free_bytes = activations_bytes + more_bytes, free_bytes - more_bytes
    free_bytes -= chosen.adapters.num_reserved_bytes if chosen.adapters else 0
    free_bytes -= chosen.kept_bytes
    beside_bytes = chosen.adapters_bytes + chosen.vision_bytes + (draft.plan.weights_bytes if draft else 0)
    plan = make_plan(
        config,
        chosen.planned_groups + (draft.groups if draft else ()),
        weights_bytes=model.weights_bytes + beside_bytes,
        activations_bytes=activations_bytes,
        free_bytes=free_bytes,
        adapters_bytes=chosen.adapters_bytes,
        host=chosen.host,
        vision_bytes=chosen.vision_bytes,
        encoding_bytes=chosen.encoding_bytes,
    )
    if ranks:
        ranks.send(plan)
    return plan


def measure_memory(
    model: LoadedModel,
    model_config: ModelFacts,
    config: EngineConfig,
    groups: tuple[CacheGroup[CacheSpec], ...],
    draft: DraftCheckpoint | None,
) -> tuple[int, int]:
    """What the largest step needs, and the memory that is then free; of several ranks, who all call it, the least."""
    activations_bytes = _measure_activations(model, model_config, config, groups)
    if draft:  # a step computes one model after the other
        activations_bytes = max(activations_bytes, draft.activations_bytes)
    if config.device.type == "cuda":
        torch.cuda.empty_cache()  # frees what measuring took, so that it is counted once
    free_bytes = engine_config.free_bytes(config) - activations_bytes
    if config.options.num_ranks > 1:
        free_bytes = least_of_ranks(free_bytes, config.device)
    return activations_bytes, free_bytes


def _measure_activations(
    model: LoadedModel, model_config: ModelFacts, config: EngineConfig, groups: tuple[CacheGroup[CacheSpec], ...]
) -> int:
    """Bytes that the largest step needs beside weights and cache.

    On CUDA that step is run with a cache of its own, sampled in the most costly way. Torch's peak is then read. The run
    also compiles kernels that only some rows need. On the CPU it would take seconds, so the shapes give an estimate.
    """
    if config.device.type != "cuda":
        return estimate_activations_bytes(model_config, config, [group.spec for group in groups])
    batch = largest_batch(config, [group.spec for group in groups])
    num_blocks = max(int(group.block_tables.max()) for group in batch.groups) + 1
    caches = make_caches(groups, num_blocks, config, model_config.num_heads, batch.num_requests)
    before = torch.cuda.memory_allocated(config.device)
    torch.cuda.reset_peak_memory_stats(config.device)
    if config.rank:
        has_head = config.rank < config.options.tensor_parallel_size
        FollowingRunner(model, caches, config.device, overlap=False, has_head=has_head).follow(batch)
        torch.cuda.synchronize(config.device)
    else:
        runner = ModelRunner(model, caches, config.device, sampling=choose_sampling(config))
        # One of several ranks must not begin again alone: the others wait for the sums of its first try.
        launch = runner.launch if config.options.num_ranks == 1 else runner.launch_once
        runner.collect(launch(batch))
    return torch.cuda.max_memory_allocated(config.device) - before
