"""The engine process: takes requests from the sockets, runs steps, sends outputs.

Messages are taken between two steps. The process blocks only when there is nothing to do, and even then gives a sign of
life every second. It is a direct child of the supervisor, dies with it, and ignores SIGINT and SIGTERM. The supervisor
ends it with SIGKILL, since it holds nothing that must be saved. Exit code 2 means that the model cannot be loaded; one
line on stderr, and the file FAULT_NAME, say why. An engine that is told to leave ends with 0 as soon as it has answered
what it has accepted. Outputs whose prompt must be stored first are held back by `StoredPrompts`.
"""

import logging
import os
import pathlib
import secrets
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from weft.engine.cache.manager import KVCacheManager
from weft.engine.loop.crash_record import CrashRecord, Fingerprint, StallRule, fingerprint
from weft.engine.loop.pending import RejectedError
from weft.engine.loop.server_link import ServerLink
from weft.engine.request import Outputs
from weft.engine.schedule.scheduler import ScheduledRequest, ScheduledStep
from weft.engine.start.launch import cannot_load, follow_parent
from weft.engine.start.startup import Started, start
from weft.engine.vision.shared import with_pictures
from weft.engine.wire import errors as logs
from weft.engine.wire import messages as wire
from weft.engine.wire.errors import EXIT_CANNOT_LOAD as EXIT_CANNOT_LOAD
from weft.engine.wire.errors import first_line
from weft.engine.wire.machine import collect_rarely
from weft.engine.wire.status_page import MAX_NAME_BYTES, Status, StatusPage

logger = logging.getLogger(__name__)

_STUCK_POLL_S = 0.005
"""Pause when requests wait but none can run, which only another message can change."""
_LEAVE_S = 0.1
"""An engine that is to leave does so after this long without work: by then every server knows."""
_NAMES_EVERY_S = 0.05
"""How often the names of adapters are looked at while there is work."""
_LOG_EVERY_S = 5.0
"""How often the log says how far loading is."""


class EngineProcess:
    """Connects sockets, engine, status page and crash record."""

    def __init__(self, runtime_dir: pathlib.Path, options: wire.EngineOptions) -> None:
        """Load the model; servers can connect when this returns.

        Raises:
            ModelError: The model cannot be loaded.
        """
        self._record = CrashRecord(runtime_dir)
        self._page = StatusPage(runtime_dir / wire.STATUS_NAME)
        is_first = not self._page.read().epoch_id
        self._epoch_id = secrets.randbits(63) | 1
        self._fingerprints: dict[tuple[int, int], Fingerprint] = {}
        self._have_run: set[tuple[int, int]] = set()  # those of them that were in a step that has ended
        self._is_leaving = False
        self._left: set[tuple[int, int]] = set()  # those of them that ended, or a choice of which ended
        self._progress_logged = time.monotonic()
        self._page.write(Status(epoch_id=self._epoch_id, progress_time=self._progress_logged))
        self._lora_names, self._names_time = b"", 0.0
        self._publisher = None
        if options.kv_events:
            from weft.engine.cache.event_publisher import EventPublisher  # needs zmq

            self._publisher = EventPublisher(
                options.kv_events, options.kv_events_topic or "", options.kv_events_replay, options.kv_events_buffer
            )
        epoch = f"{self._epoch_id:016x}"
        started = start(
            options,
            epoch,
            progress=self._show_progress,
            show_missing=self._show_missing,
            before_launch=self._before_launch,
        )
        _announce(started, options)
        self._engine = started.engine
        if is_first:  # a later one must not end because of an adapter: who asks for it is told
            self._engine.pending.adapters.load_first(options.lora)
        self._link = ServerLink(runtime_dir / wire.SOCKET_NAME, started.info)
        self._tier, self._places = started.tier, started.places
        self._events = started.events
        self._num_blocks = started.info.num_blocks
        self._stored = StoredPrompts(started.engine.scheduler.kv, is_every=options.kv_role == "prefill")
        self._stall_rule = StallRule(options.stall_timeout_s, started.info.device)
        self._write_status()

    def run(self) -> None:
        """Serve until it is told to leave, and has nothing left to do."""
        heartbeat_s = self._stall_rule.heartbeat_s
        is_stuck = False
        idle_since = time.monotonic()
        idle_s: float | None = 0.0  # until `Engine.prepare` has something to do; None: never
        while True:
            is_idle = not (self._engine.has_work or self._link.has_unsent or self._stored)
            if self._is_leaving and is_idle and time.monotonic() - idle_since >= _LEAVE_S:
                return
            leave_s = _LEAVE_S if self._is_leaving else None
            stored_s = _STUCK_POLL_S if self._stored else None
            waits = [seconds for seconds in (idle_s, heartbeat_s, leave_s, stored_s) if seconds is not None]
            timeout = (_STUCK_POLL_S if is_stuck else 0.0) if self._engine.has_work else min(waits, default=None)
            messages = list(self._link.poll(timeout))
            for connection, message in messages:
                self._apply(connection, message)
                idle_since = time.monotonic()
            if idle_s is not None and not messages and not self._engine.has_work:
                idle_s = self._engine.prepare(time.monotonic() - idle_since)
            self._answer_ready()
            outputs: Outputs = []
            steps: list[ScheduledStep] = []
            if self._engine.has_work:
                idle_since, idle_s = time.monotonic(), 0.0
                num_steps = self._engine.scheduler.counters.num_steps
                outputs, steps = self._engine.step(), self._engine.ended_steps
                is_stuck = not self._engine.launched_steps and self._engine.scheduler.counters.num_steps == num_steps
            self._forget_ended(outputs)
            if not self._engine.has_work:
                self._record.end_step()
            self._write_status()
            self._link.put_outputs(self._stored.hold(steps, outputs))
            self._publish_events()

    def _publish_events(self) -> None:
        if self._publisher is not None and self._events is not None:
            self._publisher.publish(self._events.take())

    def _apply(self, connection: int, message: wire.ToEngine | None) -> None:
        if message is None:
            self._engine.abort_connection(connection)
            self._left.update(key for key in self._fingerprints if key[0] == connection)
        elif isinstance(message, wire.AbortRequest):
            self._engine.abort(connection, message.request_id, message.index)
            self._left.add((connection, message.request_id))
        elif isinstance(message, wire.Leave):
            self._is_leaving = True
        else:
            self._add(connection, message)

    def _add(self, connection: int, add: wire.AddRequest) -> None:
        mark = fingerprint(add)
        try:
            if self._record.is_condemned(mark):
                raise RejectedError(
                    wire.RejectReason.POISON, "this request ended the engine twice and is not run again"
                )
            is_accepted = self._engine.add(
                connection, with_pictures(add, self._places), runs_alone=self._record.is_suspect(mark)
            )
        except RejectedError as error:
            self._link.put(connection, wire.Rejected(add.request_id, error.reason, str(error)))
            return
        self._fingerprints[connection, add.request_id] = mark
        if is_accepted:
            self._link.put(connection, wire.Accepted(add.request_id))
        else:
            self._write_suspects()

    def _answer_ready(self) -> None:
        """Tell the servers which requests have their grammar and adapter now, and which are refused."""
        for ready in self._engine.take_ready():
            connection, request_id, _ = ready.request.key
            if ready.fault is None:
                self._link.put(connection, wire.Accepted(request_id))
            else:
                self._link.put(connection, wire.Rejected(request_id, ready.reason, ready.fault))
                self._left.add((connection, request_id))
        if self._engine.pending:  # other compilations may have begun
            self._write_suspects()

    def _before_launch(self, step: ScheduledStep) -> None:
        self._write_suspects(step)
        self._write_status(step)

    def _write_suspects(self, *steps: ScheduledStep) -> None:
        """Record the requests of launched steps and of these, and those whose grammar is being compiled."""
        requests = [s.request for step in (*self._engine.launched_steps, *steps) for s in step.requests]
        requests += self._engine.pending.suspects
        keys = dict.fromkeys(request.key[:2] for request in requests)
        self._record.begin_step([self._fingerprints[key] for key in keys if key in self._fingerprints])

    def _forget_ended(self, outputs: Outputs) -> None:
        """Drop the fingerprints of requests that have ended.

        A suspect that ran is cleared, whoever ended it: its server may have found a stop string, or its client may have
        left. A request that is still on the device stays on record until its last step has ended.
        """
        self._have_run |= _keys(self._engine.ended_steps) & self._fingerprints.keys()
        self._left |= {(c, o.request_id) for c, o in outputs if o.finish_reason is not None}
        on_device = _keys(self._engine.launched_steps)
        for key in self._left - on_device:
            if self._engine.is_live(*key):
                continue
            mark, has_run = self._fingerprints.pop(key, None), key in self._have_run
            self._have_run.discard(key)
            if mark is not None and has_run:
                self._record.clear(mark)
        self._left &= on_device

    def _show_progress(self, done: int, total: int) -> None:
        """Show how many bytes of the weights are loaded: on the status page, and now and then in the log."""
        now = time.monotonic()
        self._page.write(replace(self._page.read(), progress_time=now, loaded_bytes=done, total_bytes=total))
        if now - self._progress_logged >= _LOG_EVERY_S:
            self._progress_logged = now
            logger.info("loading weights: %d of %d MB", done // 1_000_000, total // 1_000_000)

    def _show_missing(self, num_machines: int) -> None:
        """Show that so many machines have not joined yet."""
        now = time.monotonic()
        self._page.write(replace(self._page.read(), progress_time=now, num_missing_machines=num_machines))

    def _write_status(self, *steps: ScheduledStep) -> None:
        """Give a sign of life, with the time until the next is due; `steps` are about to be launched."""
        scheduler = self._engine.scheduler
        predicted_s = [scheduler.cost.predict(step.load) for step in (*self._engine.launched_steps, *steps)]
        now = time.monotonic()
        pools = scheduler.kv.pools
        adapters = self._engine.pending.adapters
        if adapters.num_slots and (now >= self._names_time + _NAMES_EVERY_S or not self._engine.has_work):
            self._lora_names, self._names_time = adapters.use().pack(MAX_NAME_BYTES), now
        self._page.write(
            Status(
                epoch_id=self._epoch_id,
                is_ready=1,
                progress_time=now,
                stall_time=self._stall_rule.stall_time(now, sum(predicted_s) if predicted_s else None),
                has_work=int(self._engine.has_work),
                num_requests_running=len(scheduler.running),
                num_requests_waiting=self._engine.num_waiting,
                num_blocks=self._num_blocks - 1,
                num_used_blocks=max(pool.num_used for pool in pools),
                num_cached_blocks=max(pool.num_indexed for pool in pools),
                kv_offload_host_blocks=self._tier.num_host_blocks if self._tier else 0,
                kv_offload_disk_blocks=self._tier.num_disk_blocks if self._tier else 0,
                num_lora_slots=adapters.num_slots,
                num_used_lora_slots=adapters.num_used_slots,
                lora_names=self._lora_names,
                **msgspec.structs.asdict(scheduler.counters),
            )
        )


def _keys(steps: list[ScheduledStep]) -> set[tuple[int, int]]:
    """Connection and request id of all requests in these steps."""
    return {s.request.key[:2] for step in steps for s in step.requests}


def _announce(started: Started, options: wire.EngineOptions) -> None:
    info = started.info
    logger.info("model        %s (%s)", pathlib.Path(options.model).name, info.architecture)
    logger.info("device       %s, %s, attention %s", info.device, info.dtype, info.attention_backend)
    for line in started.plan.lines():
        logger.info(line)
    logger.info("limits       %d requests at once, %d tokens a step", info.max_num_seqs, info.max_num_batched_tokens)


@dataclass(slots=True)
class _Held:
    stored: "Future[None]"
    outputs: Outputs = field(default_factory=list)


class StoredPrompts:
    """Holds outputs back until the prompt before them is stored where other engines find it.

    So whoever gets the first output may send the prompt to another engine, which loads it. The blocks are held and
    written by the cache (`engine/cache/tier.py`), which bounds the time.
    """

    def __init__(self, kv: KVCacheManager, *, is_every: bool) -> None:
        """Store the prompts of requests that ask for it, or of every request."""
        self._kv = kv
        self._is_every = is_every
        self._held: dict[tuple[int, int], _Held] = {}  # by connection and request id

    def __bool__(self) -> bool:
        """Whether outputs are held back. Then `hold` has to be called again soon."""
        return bool(self._held)

    def hold(self, steps: Sequence[ScheduledStep], outputs: Outputs) -> Outputs:
        """Begin to store the prompts that these ended steps have computed to their end.

        Returns:
            The outputs that may be sent now, of these and of those held back before; in order for each request.
        """
        for scheduled in (each for step in steps for each in step.requests if self._is_due(each)):
            request = scheduled.request
            if request.key[:2] not in self._held:
                hashes = request.block_hashes[: request.num_prompt_tokens // self._kv.block_size]
                self._held[request.key[:2]] = _Held(self._kv.offload.store(hashes))
        if not self._held:
            return outputs
        self._kv.finish_loads()
        sent: Outputs = []
        for connection, output in outputs:
            held = self._held.get((connection, output.request_id))
            (sent if held is None else held.outputs).append((connection, output))
        for key in [key for key, held in self._held.items() if held.stored.done()]:
            sent += self._held.pop(key).outputs
        return sent

    def _is_due(self, scheduled: ScheduledRequest) -> bool:
        request = scheduled.request
        if not (self._is_every or request.caching.is_stored):
            return False
        return scheduled.start < request.num_prompt_tokens <= scheduled.start + scheduled.num_tokens


def main(runtime_dir: pathlib.Path) -> int:
    """Run the engine with the options that the supervisor writes to standard input."""
    if not follow_parent(os.getppid()):
        return 1
    options = msgspec.json.decode(sys.stdin.buffer.read(), type=wire.EngineOptions)
    logs.configure(options.log_format, "engine")
    try:
        process = EngineProcess(runtime_dir, options)
    except Exception as error:
        code = cannot_load(error)
        (runtime_dir / wire.FAULT_NAME).write_text(first_line(error))
        return code
    collect_rarely()
    process.run()
    os._exit(0)  # as when it is killed: nothing must be saved, and no thread is waited for


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
