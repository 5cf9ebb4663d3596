"""Between the socket and the scheduler: checks a request, and holds it while it waits for a grammar or an adapter.

The step loop polls, and nothing that it calls here blocks.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from weft.engine.batch import Executor
from weft.engine.guidance.compiler import InvalidGrammarError
from weft.engine.loop.beams import beam_fault
from weft.engine.loop.grammars import PendingGrammars, Ready
from weft.engine.request import Request, RequestStatus
from weft.engine.sampling.pooling import PooledModel, pooling_fault
from weft.engine.schedule.scheduler import ScheduledStep, Scheduler
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import NO_INPUT, InputLimits, id_fault
from weft.engine.wire.messages import AddRequest, RejectReason
from weft.engine.wire.options import ADAPTER_S, Adapter, AdapterUse, find_adapter, read_through
from weft.engine.wire.waiting_threads import WaitingThreads

logger = logging.getLogger(__name__)


class RejectedError(Exception):
    """The request cannot be accepted; the message is fit for the caller."""

    def __init__(self, reason: RejectReason, message: str) -> None:
        """Keep the reason beside the message."""
        super().__init__(message)
        self.reason = reason


def request_fault(
    add: AddRequest,
    vocab_size: int,
    num_adapter_slots: int,
    vectors: PooledModel | None,
    limits: InputLimits = NO_INPUT,
) -> str | None:
    """The first fault of a request, fit for the caller; None when there is none. O(ids listed).

    This is the only check between the socket and the scheduler, of everything but the request's length. The ranges of
    sampling parameters are not checked here: `SamplingParams` does that when it is made. Nor is anything that depends
    on the state of the engine.
    """
    faults = _faults(add, vocab_size, num_adapter_slots, vectors, limits)
    return next((fault for fault in faults if fault is not None), None)


def _faults(
    add: AddRequest, vocab_size: int, num_adapter_slots: int, vectors: PooledModel | None, limits: InputLimits
) -> Iterator[str | None]:
    params, budget = add.sampling_params, add.guidance.reasoning_budget
    if add.input.input_length and not limits.longest:
        yield "this model has no encoder"
    yield add.input.fault(vocab_size, limits)
    if add.input.input_length and params.prompt_logprobs is not None:
        yield "prompt_logprobs is not supported by a model with an encoder"
    if add.num_choices < 1:
        yield f"num_choices must be at least 1, got {add.num_choices}"
    if add.adapter is not None and not num_adapter_slots:
        yield f"this model takes no adapters, got {add.adapter.name}: max_loras must be at least 1, but is 0"
    if add.pooling is not None:
        yield pooling_fault(add, add.pooling, vectors)
    if add.beams is not None:
        yield beam_fault(add, vocab_size)
    if budget is not None and budget.max_tokens < 0:
        yield f"reasoning_budget must be at least 0, got {budget.max_tokens}"
    allowed = params.allowed_token_ids or ()
    for name, listed in (("stop_token_ids", params.stop_token_ids), ("allowed_token_ids", allowed)):
        if len(listed) > vocab_size:
            yield f"{name} must hold at most {vocab_size} ids, got {len(listed)}"
    yield id_fault("prediction", add.guidance.prediction_token_ids, vocab_size)
    yield id_fault("logit_bias", params.logit_bias, vocab_size)
    yield id_fault("stop_token_ids", params.stop_token_ids, vocab_size)
    yield id_fault("allowed_token_ids", allowed, vocab_size)
    yield id_fault("logprob_token_ids", params.logprob_token_ids, vocab_size)
    yield id_fault("begin_bans", params.begin_bans, vocab_size)
    yield id_fault("forced_end_id", () if params.forced_end_id is None else (params.forced_end_id,), vocab_size)
    yield id_fault("timestamps", params.timestamps.ids if params.timestamps else (), vocab_size)
    yield id_fault("bad_words", [i for word in params.bad_words_token_ids for i in word], vocab_size)
    yield id_fault("reasoning_budget", (budget.end_token_id,) if budget is not None else (), vocab_size)


_Key = tuple[int, int]


@dataclass(slots=True)
class _Slot:
    index: int  # from 1; 0 stands for the model itself
    adapter: Adapter | None = None  # what it holds, or will hold once it is loaded; None: nothing
    loading: "Future[str] | None" = None  # None: it is loaded, or empty
    load_number: int = 0
    load_deadline: float = 0.0  # who waits for the load gives up then
    use_number: int = 0
    is_draining: bool = False


@dataclass(slots=True)
class _Look:
    """At the files of an adapter, before a slot is taken for it."""

    files: "Future[None]"
    deadline: float


@dataclass(slots=True)
class _Waiting:
    request: Request
    aborted_choices: list[int] = field(default_factory=list)


class AdapterTable:
    """Holds which adapter is in which slot, and the requests that wait for one.

    A request whose adapter is in a slot is scheduled at once; any other waits here, and delays nobody. Its adapter gets
    the slot that was used least recently among those that no request of the scheduler or of a launched step uses. If
    there is none, the slot that was loaded first is drained: it takes no new request, so it becomes free once those
    that use it have ended. So every adapter gets its turn, in the order in which requests began to wait.

    A disk may hang. So the files of an adapter are read once, in a thread that nobody waits for, before a slot is taken
    for it, and whoever waits gives up after ADAPTER_S.
    """

    def __init__(
        self, num_slots: int, scheduler: Scheduler, executor: Executor[Any], num_with_modules: int = 0
    ) -> None:
        """Start with empty slots. The executor is asked only if there are any.

        Args:
            num_with_modules: How many of them, from the first on, have room for modules of an adapter's own.
        """
        self.num_with_modules = num_with_modules
        self._slots = [_Slot(index) for index in range(1, num_slots + 1)]
        self._scheduler = scheduler
        self._executor = executor
        self._waiting: dict[Adapter, dict[_Key, _Waiting]] = {}  # the adapter that is waited for longest first
        self._adapters: dict[_Key, Adapter] = {}  # of the requests in _waiting
        self._number = 0  # of the latest load or use
        self._looks: dict[Adapter, _Look] = {}
        self._threads = WaitingThreads("adapter files", _MAX_LOOKS)

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def num_slots(self) -> int:
        """How many adapters may be used at once."""
        return len(self._slots)

    @property
    def num_used_slots(self) -> int:
        """How many slots hold an adapter, or are about to."""
        return sum(slot.adapter is not None for slot in self._slots)

    def has(self, connection: int, request_id: int) -> bool:
        """Whether a request waits here."""
        return (connection, request_id) in self._adapters

    def use(self) -> AdapterUse:
        """Which adapters are used and waited for, in O(requests)."""
        running, waiting = set[str](), {adapter.name for adapter in self._waiting}
        for request in self._scheduler.requests.values():
            if request.adapter is not None:
                (running if request.status is RequestStatus.RUNNING else waiting).add(request.adapter.name)
        return AdapterUse(
            tuple(sorted(running)),
            tuple(sorted(waiting)),
            tuple(sorted({slot.adapter.name for slot in self._slots if slot.adapter and slot.loading is None})),
        )

    def load_first(self, folders: Mapping[str, str]) -> None:
        """Load adapters before there are requests, and wait. Of more than there are slots, the last ones stay.

        Raises:
            ModelError: One cannot be loaded.
        """
        for name, folder in folders.items():
            try:
                adapter = find_adapter(name, Path(folder))
            except ModelError as error:
                raise ModelError(_cannot(name, str(error))) from None
            slot = self._begin_load(self._fitting(adapter), adapter)
            if slot.loading is not None:
                wait([slot.loading], ADAPTER_S)
                if not slot.loading.done():
                    raise ModelError(_cannot(name, _LATE))
            if (fault := self._end_load(slot)) is not None:
                raise ModelError(fault)

    def admit(self, request: Request, aborted_choices: Sequence[int] = ()) -> bool:
        """Give a request the slot of its adapter; False if it waits for it here."""
        assert request.adapter is not None
        slot = self._slot_of(request.adapter)
        if slot is not None and slot.loading is None and not slot.is_draining:
            self._give(slot, request)
            return True
        key = request.key[:2]
        self._waiting.setdefault(request.adapter, {})[key] = _Waiting(request, list(aborted_choices))
        self._adapters[key] = request.adapter
        return False

    def abort(self, connection: int, request_id: int, index: int | None = None) -> None:
        """Forget a request, or note that one of its choices was aborted."""
        key = connection, request_id
        if (adapter := self._adapters.get(key)) is None:
            return
        if index is None:
            self._drop(key)
        else:
            self._waiting[adapter][key].aborted_choices.append(index)

    def abort_connection(self, connection: int) -> None:
        """Forget the requests of a server whose connection is closed."""
        for key in [key for key in self._adapters if key[0] == connection]:
            self._drop(key)

    def take_ready(self, launched: Sequence[ScheduledStep], given: Sequence[Ready] = ()) -> list[Ready]:
        """Remove and return the requests whose wait is over.

        Args:
            launched: The steps on the device, whose slots must stay as they are.
            given: Requests that are about to be scheduled, whose slots must, too.
        """
        ready: list[Ready] = []
        for gone in self._looks.keys() - self._waiting.keys():
            self._looks.pop(gone).files.cancel()
        for each in self._slots:
            each.is_draining = False
            is_over = each.loading is not None and each.loading.done()
            if is_over and (adapter := each.adapter) and (fault := self._end_load(each)) is not None:
                ready += self._take(adapter, fault, RejectReason.ADAPTER)
        if not self._adapters:
            return ready
        ready += self._expired()
        in_use: set[int] | None = None  # None: not looked at
        for adapter in list(self._waiting):
            slot = self._slot_of(adapter)  # None: it is in none
            if slot is None:
                if in_use is None:
                    in_use = self._in_use(launched) | {r.request.adapter_slot for r in (*given, *ready)}
                if (fault := self._make_room(adapter, in_use)) is not None:
                    ready += self._take(adapter, fault, RejectReason.ADAPTER)
            elif slot.loading is not None and self._scheduler.clock() > slot.load_deadline:
                ready += self._take(adapter, _cannot(adapter.name, _LATE), RejectReason.ADAPTER)
            elif slot.loading is None and not slot.is_draining:
                taken = self._take(adapter)
                for admitted in taken:
                    self._give(slot, admitted.request)
                ready += taken
                if in_use is not None:
                    in_use.add(slot.index)
        return ready

    def _make_room(self, adapter: Adapter, in_use: set[int]) -> str | None:
        """Begin to load an adapter, or let a slot drain for it; neither, if all of them drain or are being loaded.

        Returns:
            Why it cannot be loaded, in which case no other adapter loses its slot; None if it may be possible.
        """
        look, loaded = self._looks.get(adapter), self._fitting(adapter)
        if look is not None and not look.files.done():
            if self._scheduler.clock() <= look.deadline:
                return None
            self._looks.pop(adapter).files.cancel()
            return _cannot(adapter.name, _LATE)
        if idle := [slot for slot in loaded if slot.index not in in_use]:
            if look is None:
                files = self._threads.submit(partial(read_through, Path(adapter.folder)))
                look = self._looks[adapter] = _Look(files, self._scheduler.clock() + ADAPTER_S)
            if look.files.done():
                del self._looks[adapter]
                if (error := look.files.exception()) is not None:
                    return _cannot(adapter.name, str(error))
                self._begin_load(idle, adapter)
        elif busy := [slot for slot in loaded if not slot.is_draining]:
            min(busy, key=lambda slot: slot.load_number).is_draining = True
        return None

    def _in_use(self, launched: Sequence[ScheduledStep]) -> set[int]:
        """Slots of requests that are scheduled, may be, or have left while a step still computes them."""
        on_device = {scheduled.request.adapter_slot for step in launched for scheduled in step.requests}
        return on_device | {request.adapter_slot for request in self._scheduler.requests.values()}

    def _fitting(self, adapter: Adapter) -> list[_Slot]:
        """The slots with room for an adapter that none is being loaded into; if none has room, the load will say so."""
        last = self.num_with_modules if adapter.has_modules and self.num_with_modules else len(self._slots)
        return [slot for slot in self._slots[:last] if slot.loading is None]

    def _begin_load(self, idle: Sequence[_Slot], adapter: Adapter) -> _Slot:
        """Load into an empty slot, or else the one used least recently; room for modules is left to who needs it."""
        last = 0 if adapter.has_modules else self.num_with_modules
        slot = min(idle, key=lambda slot: (slot.adapter is not None, slot.use_number, slot.index <= last))
        self._number += 1
        slot.adapter, slot.load_number, slot.use_number = adapter, self._number, self._number
        slot.load_deadline = self._scheduler.clock() + ADAPTER_S
        slot.loading = self._executor.load_adapter(slot.index, Path(adapter.folder))
        return slot

    def _end_load(self, slot: _Slot) -> str | None:
        """Take what has been loaded into use, or empty the slot and return the fault."""
        adapter, loading = slot.adapter, slot.loading
        assert adapter is not None and loading is not None
        slot.loading, error = None, loading.exception()
        if error is None and loading.result() == adapter.content:
            self._scheduler.counters.lora_loads += 1
            return None
        slot.adapter = None
        fault = f"the files in {adapter.folder} have changed; load it again with load_inplace"
        if error is not None:
            fault = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        logger.error("%s", _cannot(adapter.name, fault))
        return _cannot(adapter.name, fault)

    def _slot_of(self, adapter: Adapter) -> _Slot | None:
        return next((slot for slot in self._slots if slot.adapter == adapter), None)

    def _give(self, slot: _Slot, request: Request) -> None:
        self._number += 1
        slot.use_number, request.adapter_slot = self._number, slot.index

    def _expired(self) -> list[Ready]:
        """Requests whose deadline passed while they waited."""
        now = self._scheduler.clock()
        waiting = [each for group in self._waiting.values() for each in group.values()]
        late = [each for each in waiting if each.request.deadline is not None and now > each.request.deadline]
        for each in late:
            self._drop(each.request.key[:2])
        fault = f"the request's adapter got none of the {self.num_slots} slots (max_loras) before the deadline"
        return [Ready(each.request, fault, RejectReason.QUEUE_FULL, each.aborted_choices) for each in late]

    def _take(
        self, adapter: Adapter, fault: str | None = None, reason: RejectReason = RejectReason.INVALID
    ) -> list[Ready]:
        """Remove all that wait for an adapter."""
        group = self._waiting.pop(adapter, {})
        for key in group:
            del self._adapters[key]
        return [Ready(each.request, fault, reason, each.aborted_choices) for each in group.values()]

    def _drop(self, key: _Key) -> None:
        adapter = self._adapters.pop(key)
        del self._waiting[adapter][key]
        if not self._waiting[adapter]:
            del self._waiting[adapter]


_MAX_LOOKS = 8
"""Most adapters whose files are read at once."""
_LATE = f"its files cannot be read within {ADAPTER_S:g} s"


def _cannot(name: str, fault: str) -> str:
    return f"the adapter {name} cannot be loaded: {fault}"


class Pending:
    """Holds requests that cannot be scheduled yet: they wait for a grammar, and then for an adapter.

    Attributes:
        grammars: Compiles grammars; None rejects requests with one.
        adapters: The slots of adapters.
    """

    def __init__(self, grammars: PendingGrammars | None, adapters: AdapterTable) -> None:
        self.grammars = grammars
        self.adapters = adapters

    def __len__(self) -> int:
        return len(self.grammars or ()) + len(self.adapters)

    @property
    def suspects(self) -> list[Request]:
        """Requests whose wait a crash may be blamed on."""
        return self.grammars.requests if self.grammars is not None else []

    def has(self, connection: int, request_id: int) -> bool:
        """Whether a request waits here."""
        in_grammars = self.grammars is not None and self.grammars.has(connection, request_id)
        return in_grammars or self.adapters.has(connection, request_id)

    def take(self, request: Request, grammar: str | None) -> bool:
        """Let a request wait here if it must; whether it does.

        Raises:
            RejectedError: Its grammar cannot be followed.
        """
        if grammar is None:
            return request.adapter is not None and not self.adapters.admit(request)
        try:
            if self.grammars is None:
                raise InvalidGrammarError("this engine follows no grammars")
            self.grammars.submit(request, grammar)
        except InvalidGrammarError as error:
            raise RejectedError(RejectReason.GRAMMAR, str(error)) from error
        return True

    def take_ready(self, launched: Sequence[ScheduledStep]) -> list[Ready]:
        """Remove and return the requests whose wait is over. `launched`: the steps on the device."""
        compiled = self.grammars.take_ready() if self.grammars else []
        ready = [
            each
            for each in compiled
            if each.fault is not None
            or each.request.adapter is None
            or self.adapters.admit(each.request, each.aborted_choices)
        ]
        return ready + self.adapters.take_ready(launched, ready)

    def abort(self, connection: int, request_id: int, index: int | None = None) -> None:
        """Forget a request, or note that one of its choices was aborted."""
        self.adapters.abort(connection, request_id, index)
        if self.grammars is not None:
            self.grammars.abort(connection, request_id, index)

    def abort_connection(self, connection: int) -> None:
        """Forget the requests of a server whose connection is closed."""
        self.adapters.abort_connection(connection)
        if self.grammars is not None:
            self.grammars.abort_connection(connection)
