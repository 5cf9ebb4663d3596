"""Drafts with a smaller model of the same vocabulary (`--speculative PATH`).

`find_draft_checkpoint` checks that it fits the served model, and what it costs, before anything is loaded. `DraftModel`
drafts, by `SmallSteps`, as a head does (draft_head.py).

Its cache has the same block ids as the served model's, so shared prefixes, preemption and roll-back are those of the
served model. Drafts are decoded in a few small steps over all requests at once, into slots that the requests already
hold. The first of these steps also computes the tokens of a request that the cache has not yet (`DraftCache`), its
prompt in parts. So the draft model costs nothing while it does not draft. Both models draw with the same random
numbers, so equal distributions give equal ids.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

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
from weft.engine.runner.cuda_graphs import ComputedStep
from weft.engine.runner.model_runner import Follower, ModelRunner
from weft.engine.schedule.batch_builder import build_batch
from weft.engine.schedule.scheduler import ScheduledRequest, ScheduledStep
from weft.engine.start.draft_cache import DraftCache
from weft.engine.start.model_choice import ModelPlan, plan_model, read_model
from weft.engine.wire.errors import ModelError


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A checked draft model, or a head of the served model.

    Attributes:
        name: For the log.
        engine_config: That of the served model, with the kernels that compute this one.
        group_indices: For each of its cache groups, the served group whose block tables it uses.
        is_head: Whether it is a head; then config is that of the served model for its own, and that of its layer for
            EAGLE-3.
    """

    name: str
    config: ModelFacts
    engine_config: EngineConfig
    plan: ModelPlan
    groups: tuple[CacheGroup[CacheSpec], ...]
    group_indices: list[int]
    activations_bytes: int
    is_head: bool = False


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
    folder = config.draft_model
    if folder is None:
        return None
    draft = replace(read_model(folder, config.options.model_impl), vision=None)
    if draft.vocab_size != vocab_size:
        raise ModelError(
            f"the draft model must have the vocabulary of the model: it has {draft.vocab_size} token ids, "
            f"the model {vocab_size}"
        )
    # The first of several ranks drafts alone, and without adapters: the model only accepts fewer of the drafts then.
    options = replace_fields(config.options, tensor_parallel_size=1, pipeline_parallel_size=1, max_loras=0)
    config = tune(draft, replace(config, options=options, kernels=options.kernels, num_host_layers=0))
    try:
        plan = plan_model(draft, config)
    except ModelError as error:
        raise ModelError(f"the draft model cannot be used: {error}") from None
    groups = plan.groups
    return DraftCheckpoint(
        name=f"draft model {folder.name}",
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

_RECOVERY = 0.998
"""Weight of experience after each step without a draft: a draft costs a step of the draft model, so few are tried."""

_GAIN = 0.1
"""How fast the average time of a small step follows new measurements."""

_AGEING = 0.9995
"""Factor on that average for each step, so that drafts which once took too long are tried again."""


_CATCH_UP_TOKENS = 256
"""Most tokens that a step computes of what the cache has not yet; others wait meanwhile."""


class SmallSteps(Follower):
    """Drafts by small steps of a runner of its own, into slots that the requests already hold."""

    def __init__(
        self,
        runner: ModelRunner,
        kv: KVCacheManager,
        group_indices: Sequence[int],
        max_num_tokens: int,
        *,
        shares_tables: bool = True,
    ) -> None:
        """Take over what drafts, loaded, with a cache of as many blocks as kv has.

        Args:
            runner: Of what drafts.
            kv: The served model's cache manager.
            group_indices: For each cache group of what drafts, the group of the served model whose tables it uses.
            max_num_tokens: Most tokens of a step.
            shares_tables: Whether it looks up positions where the served model does, see `Batch.table_rows`.
        """
        self._shares_tables = shares_tables
        self.pace = Pace(_FORGETTING, _RECOVERY)
        self._runner = runner
        self._kv = kv
        self._group_indices = group_indices
        self._max_num_tokens = max_num_tokens
        self._small_step_s = 0.0
        self._device_s = 0.0

    @override
    def prepare(self) -> bool:
        return self._runner.prepare()

    @override
    def give_up_memory(self) -> None:
        self._runner.give_up_memory()

    @override
    def take_device_s(self) -> float:
        # Of the small steps alone: what `follow` computes is part of the step that it follows.
        taken, self._device_s = self._device_s, 0.0
        return taken

    def price(self, step_s: float) -> float:
        """Time of one small step, as a fraction of a step of step_s seconds; 0 before either is known."""
        self._small_step_s *= _AGEING
        return self._small_step_s / step_s if step_s else 0.0

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[list[int]]:
        """Decode up to num_drafts ids for each request; fewer if it needs fewer or holds too few slots.

        A request of which the cache still lacks more tokens than a step may compute gets none.
        """
        began = time.perf_counter()
        parts = list(self._first_parts(requests, num_drafts))
        previous, launched = None, []
        while parts:
            step, batch = self._batch(parts, previous)
            launched.append((parts, self._runner.launch(batch)))
            parts = [_Part(p.request, p.end, 1, p.num_left - 1) for p in parts if p.num_left > 1]
            previous = step
        drafts: dict[Request, list[int]] = {request: [] for request in requests}
        for parts, launch in launched:
            result = self._runner.collect(launch)
            self._device_s += result.device_s or 0.0
            drawing = (part.request for part in parts if part.num_left)
            for request, token_id in zip(drawing, result.token_ids, strict=True):
                drafts[request].append(token_id)
        if launched:
            for part in launched[0][0]:
                known = part.request.token_ids[part.start : part.end]
                drafted = drafts[part.request][:-1]  # the last one was only drawn
                self.note(part.request, part.start, known + drafted, len(known))
            if sum(part.num_tokens for part in launched[0][0]) <= 2 * len(requests):
                seconds = (time.perf_counter() - began) / len(launched)
                self._small_step_s += (_GAIN if self._small_step_s else 1.0) * (seconds - self._small_step_s)
        return list(drafts.values())

    def _first_parts(self, requests: Sequence[Request], num_drafts: int) -> "Iterator[_Part]":
        """What the first step computes: what the cache lacks of each request, and its last token if it draws then."""
        left = self._max_num_tokens - len(requests)
        budget = min(_CATCH_UP_TOKENS, left)
        for request in requests:
            start, last = self.num_right(request), request.num_tokens - 1
            input_left = max(request.num_input_slots - start, 0)  # what an encoder reads is computed whole
            num_missing = input_left * (input_left <= left) if input_left else min(last - start, max(budget, 0))
            room = 0
            if num_missing == last - start:
                room = self._kv.reserve(request, min(num_drafts, request.num_remaining_tokens - 1))
                start = self.num_right(request)  # blocks may have left a sliding window
                num_missing = last - start
            budget, left = budget - num_missing, left - num_missing
            if num_missing or room:
                yield _Part(request, start, num_missing + (room > 0), room)

    def num_right(self, request: Request) -> int:
        """Leading tokens of a request, without the last one, that need not be computed: here all of them."""
        return request.num_tokens - 1

    def note(self, request: Request, start: int, token_ids: list[int], num_known: int) -> None:
        """See `DraftCache.note`; here nothing is kept."""

    def _batch(self, parts: "Sequence[_Part]", previous: ScheduledStep | None) -> tuple[ScheduledStep, Batch]:
        """A step of these parts; a request's last token is known, or was drafted by `previous`."""
        num_rows = list(accumulate((part.num_left > 0 for part in parts), initial=0))
        step = ScheduledStep(num_rows=num_rows[-1], blocks=StepBlocks([{} for _ in self._kv.pools]))
        step.requests = [
            ScheduledRequest(
                request=part.request,
                start=part.start,
                num_tokens=part.num_tokens,
                num_context_tokens=max(part.end, part.request.num_tokens),
                draft_token_ids=(),
                num_placeholders=int(part.end > part.request.num_tokens),
                first_row=first_row,
                num_rows=int(part.num_left > 0),
                num_preemptions=part.request.num_preemptions,
            )
            for part, first_row in zip(parts, num_rows, strict=False)
        ]
        batch = build_batch(step, previous, self._kv.block_size, self._kv.specs)
        nothing = np.full(step.num_rows, -1, np.int64)
        sampling = dataclasses.replace(batch.sampling, num_logprobs=nothing)  # nobody reads those of drafts
        return step, self._own(dataclasses.replace(batch, sampling=sampling, scores=None))

    def _own(self, batch: Batch) -> Batch:
        """The batch with the tables that the draft model's groups use."""
        groups = tuple(batch.groups[index] for index in self._group_indices)
        table_rows = batch.table_rows if self._shares_tables else None
        return dataclasses.replace(batch, groups=groups, table_rows=table_rows)


class DraftModel(SmallSteps):
    """Owner of the draft model and its cache."""

    reads_hidden = False
    launches = False

    def __init__(
        self,
        runner: ModelRunner,
        kv: KVCacheManager,
        group_indices: Sequence[int],
        max_num_tokens: int,
        *,
        shares_tables: bool = True,
    ) -> None:
        """See `SmallSteps`."""
        super().__init__(runner, kv, group_indices, max_num_tokens, shares_tables=shares_tables)
        self._cache = DraftCache(kv.pools[group_indices[0]].num_blocks, kv.block_size, group_indices[0])
        self.is_serving = False

    @override
    def follow(self, batch: Batch, computed: ComputedStep, sampled_ids: torch.Tensor | None) -> None:
        self._cache.forget(batch.groups[self._group_indices[0]])
        if not self.is_serving:  # at start-up memory is measured, and kernels are compiled
            unread = dataclasses.replace(self._own(batch), row_indices=np.zeros(0, np.int64), scores=None, pooling=None)
            self._runner.fill_caches(computed.token_ids, unread)

    @override
    def num_right(self, request: Request) -> int:
        return self._cache.num_right(request)

    @override
    def note(self, request: Request, start: int, token_ids: list[int], num_known: int) -> None:
        self._cache.note(request, start, token_ids, num_known)


class _Part(NamedTuple):
    """What a small step computes of a request.

    Attributes:
        num_left: Drafts that are still to be drawn, the one of this step included; 0 if it only fills the cache.
    """

    request: Request
    start: int
    num_tokens: int
    num_left: int

    @property
    def end(self) -> int:
        """The position behind its tokens."""
        return self.start + self.num_tokens
