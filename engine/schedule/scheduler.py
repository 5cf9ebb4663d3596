"""Decides how many tokens each request computes in a step.

One rule: every step moves `num_computed_tokens` towards `num_tokens`. Running requests are served in order (priority,
then arrival), so a request that is preempted has not been scheduled in this step yet. Decodes are charged to the budget
first. Runs of known output ids share what is left, and prefills come after them. Waiting requests are admitted into the
rest. A step may be scheduled before the previous one is collected. Owns the queues and the status of requests. Never
touches a tensor.
"""

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.engine.cache.manager import KVCacheManager, StepBlocks
from weft.engine.request import LiveRequests, Request, RequestKey, RequestStatus
from weft.engine.schedule.short_context import ShortContext
from weft.engine.schedule.step_budget import SHARE_FOR_OTHERS, LatencyTarget, StepBudget
from weft.engine.schedule.step_cost import StepCostModel, StepLoad, TokenBudget
from weft.engine.schedule.waiting_queue import WaitingQueue, candidates, in_the_way, must_wait_alone
from weft.engine.wire.status_page import Counters


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """What a request computes in a step.

    Attributes:
        request: The request itself.
        start: num_computed_tokens before the step.
        num_tokens: Tokens computed, drafts included.
        num_context_tokens: num_tokens of the request when it was scheduled. The first row samples this position.
        draft_token_ids: Guesses computed along with the rest.
        num_placeholders: Input tokens whose ids the previous step samples. They are the last ones before the drafts.
        first_row: Its first row among the sampled rows of the step.
        num_rows: 0 for a prefill chunk that does not reach the end, else 1 + drafts.
        num_preemptions: The request's count when it was scheduled. If it was preempted since, its count at collection
            differs.
    """

    request: Request
    start: int
    num_tokens: int
    num_context_tokens: int
    draft_token_ids: tuple[int, ...]
    num_placeholders: int
    first_row: int
    num_rows: int
    num_preemptions: int


@dataclass(slots=True)
class ScheduledStep:
    """One step: its requests in the order of the batch, and its block bookkeeping."""

    requests: list[ScheduledRequest] = field(default_factory=list)
    keys: set[RequestKey] = field(default_factory=set)
    load: StepLoad = field(default_factory=StepLoad)
    num_rows: int = 0
    blocks: StepBlocks = field(default_factory=lambda: StepBlocks([]))


class Scheduler:
    """Owner of all requests that are not finished."""

    def __init__(
        self,
        kv: KVCacheManager,
        cost: StepCostModel,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        itl_target_s: float | None,
        is_ahead: bool = False,
        short_context: int = 0,
        counters: Counters | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Start with no requests. The limits are per step. `LatencyTarget` explains itl_target_s and is_ahead.

        Args:
            short_context: See `ModelFacts`.
            counters: Also counted in by others; None makes new ones.
            clock: Seconds, of a simulation; None is `time.monotonic`.
        """
        self.kv, self.cost, self.clock = kv, cost, clock or time.monotonic
        self.counters, self.requests = counters or Counters(), LiveRequests()
        self.running: list[Request] = []
        self.waiting = WaitingQueue()
        self._loading: list[tuple[Request, int]] = []  # with the blocks it is expected to take beyond the loaded ones
        kv.wake_followers = self.waiting.wake
        self.mean_output_tokens = 64.0
        self._max_num_seqs = max_num_seqs
        self._short_context = ShortContext(short_context)
        self._least_prefill = max(kv.block_size, kv.pictures.longest)
        self.token_budget = TokenBudget(max_num_batched_tokens, least=max_num_seqs + self._least_prefill)
        self._target = LatencyTarget(itl_target_s, is_ahead=is_ahead)

    @property
    def has_requests(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.requests)

    # --- coming and going -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a request into the waiting queue."""
        request.status = RequestStatus.WAITING
        self._short_context.settle(request)
        self.requests[request.key] = request
        self.waiting.add(request, self.clock())

    def finish(self, request: Request) -> None:
        """End a request and free its blocks. Their content stays in the prefix cache."""
        if request.status is RequestStatus.RUNNING:
            self.mean_output_tokens += 0.05 * (request.num_output_tokens - self.mean_output_tokens)
        self.drop(request)

    def drop(self, request: Request) -> None:
        """Like `finish`, but for a beam: its length does not count for the mean output length."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv.free(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.key]

    def abort(self, connection: int, request_id: int, index: int | None = None) -> None:
        """End one choice of a request, or all of them. Unknown ones have ended already, so nothing happens."""
        for request in self.requests.choices_of(connection, request_id):
            request.pending_indices = [i for i in request.pending_indices if index is not None and i != index]
            if index is None or request.key.choice == index:
                self.finish(request)
                if request.pending_indices:
                    self.add(self.next_choice(request))

    def abort_connection(self, connection: int) -> None:
        """End all requests of a server whose connection is closed."""
        for request in [r for key, r in self.requests.items() if key.connection == connection]:
            self.finish(request)

    def next_choice(self, request: Request) -> Request:
        """Make the first pending choice a request of its own. It takes over the other pending ones."""
        (index, *others), request.pending_indices = request.pending_indices, []
        choice = request.sibling(index)
        choice.pending_indices = others
        return choice

    def fork(self, parent: Request) -> None:
        """Start the pending choices of a request whose prompt is computed. They share its blocks."""
        while parent.pending_indices:
            child = self.next_choice(parent)
            parent.pending_indices, child.pending_indices = child.pending_indices, []
            self.start_beside(parent, child)

    def start_beside(self, parent: Request, child: Request) -> None:
        """Start a request that shares the blocks of another. If there is no room now, it waits like any other."""
        shares = parent.status is RequestStatus.RUNNING and self._short_context.fits(child)
        if shares and len(self.running) < self._max_num_seqs:
            self.kv.fork(parent, child)
            if self.kv.allocate(child, 1):
                self.requests[child.key] = child
                self._run(child)
                return
            self.kv.free(child)
        self.add(child)

    def fail_steps(self, failed: Sequence[StepBlocks]) -> None:
        """Undo the block bookkeeping of failed steps; who waits for a copy that they did not make is recomputed."""
        for request in [r for r in self.running if self.kv.lacks_copies(r, failed)]:
            self._preempt(request)
        self.kv.fail_steps(failed)  # last: a request that is freed indexes its blocks

    # --- one step -------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Choose the next step; None when nothing can be computed now.

        Advances num_computed_tokens and num_placeholders of the requests chosen, and indexes the blocks that they
        fill. May preempt.
        """
        step = ScheduledStep()
        self.kv.pins.release_expired()
        self.kv.finish_loads()
        self.waiting.age(self.clock())
        outgrown = self._short_context.outgrown(self.running)
        for request in dict.fromkeys([*in_the_way(self.running, self.waiting), *outgrown]):
            self._preempt(request)
        num_preemptions = self.counters.num_preemptions
        for request in [r for r in self.running if r.pending_indices and self.kv.must_fork(r)]:
            self.fork(request)
        schedulable = [r for r in self.running if r.is_schedulable and self.kv.num_ready(r, r.num_computed_tokens, 1)]
        prefills = [r for r in schedulable if r.num_new_tokens > 1]
        budget = self._begin_budget([r for r in schedulable if r.num_new_tokens == 1], prefills)
        if len(prefills) > 1:
            self._prefill(step, budget, self.kv.pictures.first(prefills), SHARE_FOR_OTHERS)
        share = 1.0 - SHARE_FOR_OTHERS if self._has_admissible() else 1.0
        schedulable.sort(key=lambda r: r.is_run, reverse=True)  # no new id before a run is whole
        for request in schedulable:
            if request.status is not RequestStatus.RUNNING or request.key in step.keys:
                continue
            if request.num_new_tokens > 1:
                self._prefill(step, budget, request, share)
            else:
                left = self.token_budget.max_num_tokens - step.load.num_tokens
                self._schedule(step, request, min(1 + len(request.draft_token_ids), left))
        if len(self.running) < self._max_num_seqs and self.counters.num_preemptions == num_preemptions:
            self._admit_waiting(step, budget)
            self.waiting.bring_back()
        if not step.requests:
            return None
        step.blocks = self.kv.take_step_blocks()
        return step

    def _begin_budget(self, decodes: list[Request], prefills: list[Request]) -> StepBudget:
        """The budget left after one token for each decode and for each run of known output ids."""
        outputs = [r for r in prefills if r.has_computed_prompt]
        load = StepLoad()
        for request in decodes + outputs:
            load.add(1, request.num_computed_tokens)
        self._cut_drafts(decodes, load)
        num_prompts = len(prefills) - len(outputs) + self._num_fitting()
        return StepBudget(
            self.cost,
            max_num_tokens=self.token_budget.max_num_tokens,
            block_size=self.kv.block_size,
            limit_s=self._target.limit_s(
                load, self.cost, num_streams=self._num_streams(), num_prompts=num_prompts, now_s=self.clock()
            ),
            decodes=load,
        )

    def _cut_drafts(self, decodes: list[Request], load: StepLoad) -> None:
        """Cut drafts to the time and the tokens that are left, and add them to the load.

        A block's worth of tokens is kept for prefill, or as many as a picture has that is computed whole. There is
        always time for a block's worth of drafts, as there is for prefill.
        """
        drafting = [r for r in decodes if r.draft_token_ids]
        if not drafting:
            return
        num_spare = max(0, self.token_budget.max_num_tokens - load.num_tokens - self._least_prefill)
        limit_s = self._target.draft_limit_s(load, self.cost, is_awaited=len(drafting) < len(decodes))
        if limit_s is not None:
            context = max(r.num_computed_tokens for r in drafting)
            num_spare = min(num_spare, max(self.cost.num_tokens_within(load, context, limit_s), self.kv.block_size))
        for request in drafting:
            request.draft_token_ids = request.draft_token_ids[:num_spare]
            num_spare -= len(request.draft_token_ids)
            load.extend(len(request.draft_token_ids), request.num_computed_tokens + 1)

    def _num_streams(self) -> int:
        """Number of running requests that decode. One that waits for sampled ids counts: it decodes in the next step.

        While there are prompts, a request with a run of known output ids counts too, as when a grammar forces a run.
        Without prompts, such a run is computed in whole chunks.
        """
        outputs = [r for r in self.running if r.num_remaining_tokens > 0 and (r.num_new_tokens <= 1 or r.is_run)]
        has_prompts = self.waiting or any(r.num_new_tokens > 1 and not r.has_computed_prompt for r in self.running)
        return len(outputs) if has_prompts else sum(r.num_new_tokens <= 1 for r in outputs)

    def _num_fitting(self) -> int:
        """Estimate how many of the waiting requests there is room for."""
        if not self.waiting:
            return 0
        num_blocks = self.kv.num_free_blocks - sum(map(self._expected_growth, self.running))
        growth = self._expected_growth(self.waiting.first) if self.waiting.first else 1  # followers share most blocks
        num_fitting = max(num_blocks, 0) // max(growth, 1)
        return min(num_fitting, len(self.waiting), self._max_num_seqs - len(self.running))

    def _has_admissible(self) -> bool:
        """Whether the first waiting request could be admitted. Running prefills then leave it a share."""
        if (first := self.waiting.first) is None or len(self.running) >= self._max_num_seqs:
            return False
        return not first.num_placeholders and not must_wait_alone(first, self.running)

    def _prefill(self, step: ScheduledStep, budget: StepBudget, request: Request, share: float) -> None:
        num_charged = int(request.has_computed_prompt)
        context = request.num_computed_tokens + num_charged
        least = self.kv.pictures.least(request, context)
        chunk = num_charged + budget.grant(request.num_new_tokens - num_charged, context, share, least=least)
        chunk = self.kv.num_tokens_before_stop(request, request.num_computed_tokens, chunk)
        scheduled = self._schedule(step, request, min(chunk, self.token_budget.max_num_tokens - step.load.num_tokens))
        if scheduled > num_charged:
            budget.charge(scheduled - num_charged, context)

    def _schedule(self, step: ScheduledStep, request: Request, num_tokens: int) -> int:
        """Put a running request into the step. Return how many tokens it computes; 0 when no block is free for it."""
        num_tokens = self._make_room(step, request, num_tokens) if num_tokens else 0
        if num_tokens:
            self._commit(step, request, num_tokens)
        return num_tokens

    def _make_room(self, step: ScheduledStep, request: Request, num_tokens: int) -> int:
        """Allocate for up to num_tokens, preempting younger requests if not even one fits."""
        while not self.kv.allocate(request, num_tokens):
            num_available = self.kv.num_available_tokens(request)
            if 0 < num_available < num_tokens:
                num_tokens = num_available
                continue
            if (victim := self._victim(step, request)) is not None:
                self._preempt(victim)
            if victim is None or victim is request:
                return 0
        return num_tokens

    def _victim(self, step: ScheduledStep, asker: Request) -> Request | None:
        """The request to preempt for the asker; None if there is none.

        This is the youngest running one that has completed a block. It is not older than the asker, never the oldest of
        all, and not in the step. It still has tokens to compute: without any, it ends with the launched steps, or its
        search goes on from it.
        """
        for request in reversed(self.running[1:]):
            may_lose = request.num_new_tokens > 0 and request.key not in step.keys
            if may_lose and self.kv.has_completed_block(request):
                return request
            if request is asker:
                break
        return None

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.free(request)
        request.draft_token_ids = []
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.add(request)

    def _commit(self, step: ScheduledStep, request: Request, num_tokens: int) -> None:
        num_context = request.num_tokens
        num_drafts = max(0, request.num_computed_tokens + num_tokens - num_context)
        is_whole = request.num_computed_tokens + num_tokens >= num_context
        request.draft_token_ids = request.draft_token_ids[:num_drafts]
        num_rows = 1 + num_drafts if is_whole and request.num_remaining_tokens > 0 else 0
        step.requests.append(
            ScheduledRequest(
                request=request,
                start=request.num_computed_tokens,
                num_tokens=num_tokens,
                num_context_tokens=num_context,
                draft_token_ids=tuple(request.draft_token_ids),
                num_placeholders=request.num_placeholders,
                first_row=step.num_rows,
                num_rows=num_rows,
                num_preemptions=request.num_preemptions,
            )
        )
        step.keys.add(request.key)
        step.load.add(num_tokens, request.num_computed_tokens)
        step.num_rows += num_rows
        if request.num_new_tokens > 1:
            self.counters.prefill_tokens += num_tokens - request.num_padding_tokens * (not request.num_computed_tokens)
        else:
            self.counters.decode_tokens += num_tokens
        request.num_computed_tokens += num_tokens
        request.num_placeholders += num_rows > 0
        if self.kv.can_rewind:
            self.kv.index_computed_blocks(request)

    # --- admission ------------------------------------------------------------------------------------------------

    def _admit_waiting(self, step: ScheduledStep, budget: StepBudget) -> None:
        self._loading = [(r, growth) for r, growth in self._loading if r.status is RequestStatus.LOADING]
        growth = sum(map(self._expected_growth, self.running)) + sum(growth for _, growth in self._loading)
        for request, num_cached in candidates(self.waiting, self.kv, self.running):
            is_whole = self.kv.is_whole or num_cached < request.num_input_slots
            least = self.kv.pictures.least(request, num_cached)
            num_tokens = budget.grant(request.num_tokens - num_cached, num_cached, least=least, is_whole=is_whole)
            self.kv.plan_stops(request, num_cached)
            expected = growth + self._expected_growth(request) - self.kv.num_held_blocks(request, num_cached)
            if not num_tokens or ((self.running or self._loading) and expected > self.kv.num_free_blocks):
                return
            if self.kv.offload.lookups:
                if (num_reserved := self._load(request)) is not None:
                    growth += num_reserved
                    continue
                num_cached = self.kv.find_prefix(request)  # less, if room for a load was made that did not begin
            if not (num_tokens := self.kv.num_tokens_before_stop(request, num_cached, num_tokens)):
                if self.kv.num_ready(request, num_cached, 1):
                    return  # its next picture needs more room in a step
                self.waiting.set_aside(request)  # until it sees its next picture
                growth += self._expected_growth(request)
                continue
            if not self._admit(step, request, num_cached, num_tokens):
                return
            budget.charge(num_tokens, num_cached)
            growth += self._expected_growth(request)
            if len(self.running) >= self._max_num_seqs:
                return

    def _load(self, request: Request) -> int | None:
        """Begin to load what only the tier has of a prefix. Return how many blocks to reserve; None without a load.

        They are those that the request is expected to take beyond the loaded ones. If others took them, what was loaded
        would be evicted again before the request could run.
        """
        if (block_hash := self.kv.bring_back(request, self.cost.predict_prefill)) is None:
            return None
        self.waiting.park(request, block_hash)
        request.status = RequestStatus.LOADING
        num_reserved = self._expected_growth(request) - 1 - request.block_hashes.index(block_hash)
        self._loading.append((request, num_reserved))
        return num_reserved

    def _admit(self, step: ScheduledStep, request: Request, num_cached: int, num_tokens: int) -> bool:
        if not self.kv.admit(request, num_cached, num_tokens):
            return False
        self.waiting.remove(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached - (request.num_padding_tokens if num_cached else 0)
            request.queue_time_s = self.clock() - request.arrival_time
            num_prompt_tokens = request.num_prompt_tokens - request.num_padding_tokens
            self.counters.prompt_tokens += num_prompt_tokens
            self.counters.prefix_cache_queries += num_prompt_tokens
            self.counters.prefix_cache_hits += request.num_cached_tokens
        self._run(request)
        self._commit(step, request, num_tokens)
        return True

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=lambda r: r.order)

    def _expected_growth(self, request: Request) -> int:
        """Blocks that a request is expected to take beyond those of its computed tokens."""
        expected_output = max(self.mean_output_tokens - request.num_output_tokens, self.kv.block_size)
        num_tokens = request.num_new_tokens + min(expected_output, request.num_remaining_tokens)
        return self.kv.num_blocks_for(int(num_tokens))

    def check_integrity(self) -> None:
        """Assert the invariants of queues, requests and blocks."""
        self.kv.check_integrity(self.running)
        assert self.running == sorted(self.running, key=lambda r: r.order)
        self.waiting.check_integrity()
        assert len(self.running) <= self._max_num_seqs
        assert {r.key for r in self.running} | {r.key for r in self.waiting} == set(self.requests)
        assert all(r in self.requests.choices_of(*key[:2]) for key, r in self.requests.items())
        assert all(r.status is RequestStatus.RUNNING and r.block_tables for r in self.running)
        assert all(
            r.status in (RequestStatus.WAITING, RequestStatus.LOADING) and not r.block_tables for r in self.waiting
        )
