"""Accepts requests and runs steps: schedule, launch, collect.

With overlap, step n+1 is scheduled and launched before step n is collected. Without it, steps run one at a time. Does
no I/O. Reads the clock when requests arrive and when steps begin and end. Owns the scheduler and the executor.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic

from weft.engine.batch import Executor, Launched, StepResult
from weft.engine.device import is_out_of_memory
from weft.engine.loop.beams import BeamSearch, give_way
from weft.engine.loop.grammars import MaskComputer, PendingGrammars, Ready
from weft.engine.loop.output_collector import collect, end, fail
from weft.engine.loop.pending import AdapterTable, Pending, RejectedError, request_fault
from weft.engine.loop.sight import Sight
from weft.engine.request import Outputs, make_request
from weft.engine.sampling.pooling import PooledModel
from weft.engine.schedule.batch_builder import build_batch
from weft.engine.schedule.scheduler import ScheduledStep, Scheduler
from weft.engine.schedule.speculator import BatchDrafter, Drafter, Speculator
from weft.engine.wire.inputs import NO_INPUT, InputLimits
from weft.engine.wire.messages import AddRequest, FinishReason, RejectReason

logger = logging.getLogger(__name__)

_STEPS_AFTER_S = 0.5
"""Idle time after which the executor prepares for later steps, a little at a time. No request waits for that."""
_VOCABULARY_AFTER_S = 2.0
"""Idle time after which the vocabulary is read. That takes a second, and a new request may have to wait for it."""


class Engine(Generic[Launched]):
    """Owner of everything between a request and its tokens. Single-threaded."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor[Launched],
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_waiting: int,
        input_limits: InputLimits = NO_INPUT,
        eos_token_ids: tuple[int, ...] = (),
        max_loras: int = 0,
        lora_modules_to_save: int = 0,
        overlap: bool = False,
        drafters: Sequence[Drafter] = (),
        grammars: PendingGrammars | None = None,
        masks: MaskComputer | None = None,
        draft_model: BatchDrafter | None = None,
        vectors: PooledModel | None = None,
        sight: Callable[[Scheduler], Sight] = Sight,
        before_launch: Callable[[ScheduledStep], None] = lambda step: None,
    ) -> None:
        """Put the parts together.

        Args:
            scheduler: Holds the requests.
            executor: Computes batches.
            vocab_size: Token ids are from 0 to this, exclusive.
            max_model_len: Most tokens of a request.
            input_limits: On what the model's encoder reads.
            max_num_waiting: Most requests that wait; further ones are rejected.
            eos_token_ids: End an output unless the request ignores them.
            max_loras: Slots of the executor for adapters. A batch refers to them by index, from 1.
            lora_modules_to_save: The first so many of them have room for modules of an adapter's own.
            overlap: Launch a step before the one before it is collected.
            drafters: Sources of drafts, the best first; empty for plain decoding.
            grammars: Where requests wait for their grammar; None rejects requests with a grammar.
            masks: Computes what grammars allow; needed with `grammars`.
            draft_model: Drafts for the requests that no drafter has a draft for; None for no draft model.
            vectors: Makes vectors of hidden states; None rejects requests with pooling.
            sight: Makes what has pictures encoded.
            before_launch: Called with every step right before it is launched.
        """
        self.scheduler = scheduler
        self._executor = executor
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._limits, self._max_own = input_limits, input_limits.own if input_limits.longest else max_model_len
        self._max_num_waiting = max_num_waiting
        self._eos_token_ids = frozenset(eos_token_ids)
        self._overlap = overlap
        self.pending = Pending(grammars, AdapterTable(max_loras, scheduler, executor, lora_modules_to_save))
        self._masks = masks
        self._speculator = Speculator(scheduler, drafters, draft_model) if drafters or draft_model else None
        self._vectors, self.sight = vectors, sight(scheduler)
        self._before_launch = before_launch
        self._launched: deque[tuple[ScheduledStep, Launched, float]] = deque()
        self.ended_steps: list[ScheduledStep] = []
        """Steps that the last call of `step` collected, or that failed in it."""
        self._last_end = 0.0
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_requests or bool(self._launched) or bool(self.pending)

    @property
    def launched_steps(self) -> list[ScheduledStep]:
        """Steps on the device, in order, that are not collected yet."""
        return [step for step, _, _ in self._launched]

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted, or for their grammar or adapter."""
        return len(self.scheduler.waiting) + len(self.pending)

    def is_live(self, connection: int, request_id: int) -> bool:
        """Whether any choice of a request runs or waits."""
        return self.pending.has(connection, request_id) or self.scheduler.requests.has(connection, request_id)

    def add(self, connection: int, add: AddRequest, *, runs_alone: bool = False) -> bool:
        """Accept a request.

        Returns:
            False when it waits for its grammar or adapter first. `take_ready` returns the request when that is over.

        Raises:
            RejectedError: It can never run, or the queue is full.
        """
        self._check(add)
        request = make_request(
            add,
            connection=connection,
            arrival=self._num_arrivals,
            arrival_time=self.scheduler.clock(),
            eos_token_ids=self._eos_token_ids,
            max_model_len=self._longest(add),
            cache_seed=self.scheduler.kv.hashes.seed(add.cache_salt, add.adapter),
            block_size=self.scheduler.kv.block_size,
        )
        if request.edits.leave_nothing(0, request.params.min_tokens, others=request.params.begin_bans):
            fault = "allowed_token_ids must leave an id that bad_words, begin_bans and min_tokens do not ban, got none"
            raise RejectedError(RejectReason.INVALID, fault)
        request.runs_alone = runs_alone
        if add.beams is not None:
            request.continuation = BeamSearch(self.scheduler, request, add.num_choices, add.beams)
        if add.pooling is not None and self._vectors is not None:
            request.pooler = self._vectors.pooler(add.pooling, request.num_input_slots, request.num_prompt_tokens)
        self._num_arrivals += 1
        if is_ready := not self.pending.take(request, add.guidance.grammar):
            self.scheduler.add(request)
        return is_ready

    def prepare(self, idle_for_s: float) -> float | None:
        """Use idle time to prepare what a coming request would otherwise wait for, and to end loads of aborted ones.

        Args:
            idle_for_s: Seconds without a request.

        Returns:
            Further idle seconds until there is something to prepare; None if nothing is left.
        """
        is_loading = self.scheduler.kv.finish_loads()
        if idle_for_s < _STEPS_AFTER_S:
            return _STEPS_AFTER_S - idle_for_s
        if self._executor.prepare():
            return 0.0
        if is_loading:
            return _STEPS_AFTER_S
        if (grammars := self.pending.grammars) is None:
            return None
        if idle_for_s < _VOCABULARY_AFTER_S:
            return _VOCABULARY_AFTER_S - idle_for_s
        grammars.prepare()
        return None

    def take_ready(self) -> list[Ready]:
        """Requests whose wait for a grammar or adapter is over. Those without a fault now wait to be admitted."""
        ready = self.pending.take_ready(self.launched_steps)
        for each in ready:
            if each.fault is None:
                self.scheduler.add(each.request)
            for index in each.aborted_choices:
                self.scheduler.abort(*each.request.key[:2], index)
        return ready

    def abort(self, connection: int, request_id: int, index: int | None = None) -> None:
        """End one choice of a request, or all of them. Unknown ones have ended already, so nothing happens."""
        self.scheduler.abort(connection, request_id, index)
        self.pending.abort(connection, request_id, index)

    def abort_connection(self, connection: int) -> None:
        """End all requests of a server whose connection is closed."""
        self.scheduler.abort_connection(connection)
        self.pending.abort_connection(connection)

    def step(self) -> Outputs:
        """Run one step and return what the requests gained. A picture that one waits for is encoded before it.

        A failed step ends its requests with an error, and those of the steps launched after it.

        Raises:
            Exception: The device is lost, as after an illegal memory access. Only a new process can use it again.
        """
        outputs: Outputs = []
        self.ended_steps = []
        for request in self.scheduler.waiting.take_expired(self.scheduler.clock()):
            outputs += end(self.scheduler, request, FinishReason.TIMEOUT, "the deadline passed before the request ran")
        step = None
        if not self._launched:
            outputs += self.sight.encode_next()
        if not (self._launched and self.sight.is_awaited):  # or else the next call encodes
            step = self.scheduler.schedule()
            give_way(self.scheduler, step)
        try:
            if step is not None:
                self._launch(step)
            while self._launched and len(self._launched) > (self._overlap and step is not None):
                outputs += self._collect()
        except Exception as error:
            logger.exception("a step failed")
            self._executor.check_device()
            failed = self.launched_steps + ([step] if step is not None else [])
            self._launched.clear()
            self.ended_steps += failed
            has_no_memory = is_out_of_memory(error)
            fault = "the device ran out of memory" if has_no_memory else type(error).__name__
            outputs += fail(self.scheduler, failed, f"the step failed: {fault}")
            if has_no_memory:
                self.scheduler.token_budget.halve()
        return outputs

    def _launch(self, step: ScheduledStep) -> None:
        previous = self._launched[-1][0] if self._launched else None  # at most one: `step` collects the others
        batch = build_batch(step, previous, self.scheduler.kv.block_size, self.scheduler.kv.specs)
        self._before_launch(step)
        launch_time = time.perf_counter()
        masks = self._masks.begin(step) if self._masks is not None else None
        self._launched.append((step, self._executor.launch(batch, masks), launch_time))

    def _collect(self) -> Outputs:
        step, launched, launch_time = self._launched[0]
        result = self._executor.collect(launched)
        self._observe(step, launch_time, result)
        outputs = collect(self.scheduler, step, result)
        self._launched.popleft()
        self.ended_steps.append(step)
        if self._speculator is not None:
            self._speculator.draft(step)
        return outputs

    def _observe(self, step: ScheduledStep, launch_time: float, result: StepResult) -> None:
        """Time a step, by the device's clock if it has one. Steps that are launched ahead follow each other there.

        Without such a clock it is timed from its launch, or from the end of the step before it if that is later.
        """
        now = time.perf_counter()
        seconds = now - max(launch_time, self._last_end) if result.device_s is None else result.device_s
        self._last_end = now
        self.scheduler.counters.num_steps += 1
        self.scheduler.counters.step_seconds += seconds + result.drafts_device_s
        self.scheduler.cost.observe(step.load, seconds)
        self.scheduler.token_budget.observe(step.load.num_tokens)

    def _longest(self, add: AddRequest) -> int:
        """Most tokens of a request, with the places of an encoder's input."""
        return min(self._max_model_len, add.input.num_slots(self.scheduler.kv.block_size) + self._max_own)

    def _check(self, add: AddRequest) -> None:
        params, num_adapters = add.sampling_params, self.pending.adapters.num_slots
        if fault := request_fault(add, self._vocab_size, num_adapters, self._vectors, self._limits):
            raise RejectedError(RejectReason.INVALID, fault)
        least = 1 if params.max_tokens is None else params.max_tokens
        num_prompt = add.input.num_slots(self.scheduler.kv.block_size) + len(add.input.token_ids)
        if num_prompt + least > (longest := self._longest(add)):
            lengths = f"{num_prompt} in the prompt and {least} of output were asked for"
            raise RejectedError(RejectReason.CONTEXT_LENGTH, f"the context holds {longest} tokens, but {lengths}")
        if self.num_waiting >= self._max_num_waiting:
            message = f"{self.num_waiting} requests are waiting, at most {self._max_num_waiting} may"
            raise RejectedError(RejectReason.QUEUE_FULL, message)
