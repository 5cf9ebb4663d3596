"""Drafts with a smaller model of the same vocabulary (`--speculative PATH`).

`find_draft_checkpoint` checks that it fits the served model, and what it costs, before anything is loaded. `DraftModel`
drafts.

Its cache has the same block ids as the served model's, and it computes every batch that the served model computes. So
whatever holds for blocks holds for both: shared prefixes, copies, preemption, roll-back. Drafts are decoded in a few
small steps over all requests at once, into slots that the requests already hold. The step that verifies them writes
these slots again. Both models draw with the same random numbers, so equal distributions give equal ids.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from msgspec.structs import replace as replace_fields
from typing_extensions import override

from weft.engine.batch import Batch
from weft.engine.cache.manager import KVCacheManager, StepBlocks
from weft.engine.cache.specs import CacheGroup, CacheSpec
from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelFacts
from weft.engine.drafts import Pace
from weft.engine.memory_plan import estimate_activations_bytes
from weft.engine.request import Request
from weft.engine.runner.model_runner import Follower, ModelRunner
from weft.engine.schedule.batch_builder import build_batch
from weft.engine.schedule.scheduler import ScheduledRequest, ScheduledStep
from weft.engine.start.model_choice import ModelPlan, plan_model, read_model
from weft.engine.wire.errors import ModelError


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A checked draft model.

    Attributes:
        engine_config: That of the served model, with the kernels that compute this one.
        group_indices: For each of its cache groups, the served group whose block tables it uses.
    """

    config: ModelFacts
    engine_config: EngineConfig
    plan: ModelPlan
    groups: tuple[CacheGroup[CacheSpec], ...]
    group_indices: list[int]
    activations_bytes: int


def find_draft_checkpoint(
    config: EngineConfig,
    vocab_size: int,
    served: ModelPlan,
    tune: Callable[[ModelFacts, EngineConfig], EngineConfig] = lambda model, config: config,
) -> DraftCheckpoint | None:
    """Read the configuration of the draft model; None without one.

    Args:
        vocab_size: Of the served model.
        tune: Names the kernels that compute it.

    Raises:
        ModelError: It cannot be read, or cannot draft for the served model.
    """
    if config.draft_model is None:
        return None
    draft = replace(read_model(config.draft_model, config.options.model_impl), vision=None)
    if draft.vocab_size != vocab_size:
        raise ModelError(
            f"the draft model must have the vocabulary of the model: it has {draft.vocab_size} token ids, "
            f"the model {vocab_size}"
        )
    # The first of several ranks drafts alone, and without adapters: the model only accepts fewer of the drafts then.
    options = replace_fields(config.options, tensor_parallel_size=1, pipeline_parallel_size=1, max_loras=0)
    config = tune(draft, replace(config, options=options, kernels=options.kernels))
    try:
        plan = plan_model(draft, config)
    except ModelError as error:
        raise ModelError(f"the draft model cannot be used: {error}") from None
    groups = plan.groups
    return DraftCheckpoint(
        config=draft,
        engine_config=config,
        plan=plan,
        groups=groups,
        group_indices=match_groups(groups, served.groups),
        activations_bytes=estimate_activations_bytes(draft, config, plan.cache_specs),
    )


def match_groups(draft: Sequence[CacheGroup[CacheSpec]], served: Sequence[CacheGroup[CacheSpec]]) -> list[int]:
    """For each cache group of the draft model, the index of a served group that keeps all the blocks it reads.

    Raises:
        ModelError: The served model frees blocks that the draft model still reads, or one of the two has a cache that
            cannot be rolled back behind a refused draft.
    """
    if not all(group.spec.can_rewind for group in (*draft, *served)):
        raise ModelError("a draft model needs caches that can go back behind a refused draft, and a state cannot")

    def kept_by(group: CacheGroup[CacheSpec]) -> float:
        return group.spec.sliding_window or (math.inf if group.spec.sees_all else 0)  # a span may have just begun

    farthest = max(range(len(served)), key=lambda index: kept_by(served[index]))
    kept = kept_by(served[farthest])
    for group in draft:
        if (group.spec.sliding_window or math.inf) > kept:
            attended = group.spec.sliding_window or "all"
            raise ModelError(f"the draft model attends to {attended} tokens, but the model keeps only the last {kept}")
    return [farthest] * len(draft)


_FORGETTING = 0.98
"""Weight of a draft one draft later. All requests share the experience, so a single draft says little."""

_GAIN = 0.1
"""How fast the average time of a small step follows new measurements."""

_AGEING = 0.998
"""Factor on that average for each step, so that drafts which once took too long are tried again."""


class DraftModel(Follower):
    """Owner of the draft model and its cache; follows the served model's runner and proposes to its engine."""

    def __init__(
        self, runner: ModelRunner, kv: KVCacheManager, group_indices: Sequence[int], *, shares_tables: bool = True
    ) -> None:
        """Take over a loaded model with a cache of as many blocks as kv has.

        Args:
            runner: Of the draft model.
            kv: The served model's cache manager.
            group_indices: For each cache group of the draft model, the group of the served model whose tables it uses.
            shares_tables: Whether it looks up positions where the served model does, see `Batch.table_rows`.
        """
        self._shares_tables = shares_tables
        self.pace = Pace(_FORGETTING)
        self._runner = runner
        self._kv = kv
        self._group_indices = group_indices
        self._small_step_s = 0.0
        self._device_s = 0.0

    @override
    def follow(self, token_ids: torch.Tensor, batch: Batch) -> None:
        unread = dataclasses.replace(self._own(batch), row_indices=np.zeros(0, np.int64), scores=None, pooling=None)
        self._runner.fill_caches(token_ids, unread)

    @override
    def prepare(self) -> bool:
        return self._runner.prepare()

    @override
    def give_up_memory(self) -> None:
        self._runner.give_up_memory()

    @override
    def take_device_s(self) -> float:
        # Of the small steps alone: `follow` is part of the step that it follows.
        taken, self._device_s = self._device_s, 0.0
        return taken

    def price(self, step_s: float) -> float:
        """Time of one small step, as a fraction of a step of step_s seconds; 0 before either is known."""
        self._small_step_s *= _AGEING
        return self._small_step_s / step_s if step_s else 0.0

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[list[int]]:
        """Decode up to num_drafts ids for each request; fewer if it needs fewer or holds too few slots."""
        began = time.perf_counter()
        rooms = [self._kv.reserve(r, min(num_drafts, r.num_remaining_tokens - 1)) for r in requests]
        previous = None
        launched = []
        for offset in range(max(rooms)):
            chosen = [request for request, room in zip(requests, rooms, strict=True) if room > offset]
            previous, batch = self._next_batch(chosen, offset, previous)
            launched.append((chosen, self._runner.launch(batch)))
        drafts: dict[Request, list[int]] = {request: [] for request in requests}
        for chosen, step in launched:
            result = self._runner.collect(step)
            self._device_s += result.device_s or 0.0
            for request, token_id in zip(chosen, result.token_ids, strict=True):
                drafts[request].append(token_id)
        if launched:
            seconds = (time.perf_counter() - began) / len(launched)
            self._small_step_s += (_GAIN if self._small_step_s else 1.0) * (seconds - self._small_step_s)
        return list(drafts.values())

    def _next_batch(
        self, requests: list[Request], offset: int, previous: ScheduledStep | None
    ) -> tuple[ScheduledStep, Batch]:
        """A step that computes one token of each request: the last known one, or the one that `previous` drafted."""
        step = ScheduledStep(num_rows=len(requests), blocks=StepBlocks([{} for _ in self._kv.pools]))
        step.requests = [
            ScheduledRequest(
                request=request,
                start=request.num_computed_tokens + offset,
                num_tokens=1,
                num_context_tokens=request.num_tokens + offset,
                draft_token_ids=(),
                num_placeholders=int(offset > 0),
                first_row=row,
                num_rows=1,
                num_preemptions=request.num_preemptions,
            )
            for row, request in enumerate(requests)
        ]
        batch = build_batch(step, previous, self._kv.block_size, self._kv.specs)
        nothing = np.full(len(requests), -1, np.int64)
        sampling = dataclasses.replace(batch.sampling, num_logprobs=nothing)  # nobody reads those of drafts
        return step, self._own(dataclasses.replace(batch, sampling=sampling))

    def _own(self, batch: Batch) -> Batch:
        """The batch with the tables that the draft model's groups use."""
        groups = tuple(batch.groups[index] for index in self._group_indices)
        table_rows = batch.table_rows if self._shares_tables else None
        return dataclasses.replace(batch, groups=groups, table_rows=table_rows)
