"""The engine process: sockets in, steps, sockets out.

Between two steps it takes what the servers sent; it blocks only when there is nothing to do, and then still gives a
sign of life every second. A direct child of the supervisor, it dies with it and leaves SIGINT and SIGTERM to it; it is
ended with SIGKILL, since it holds nothing that must be saved. Exit code 2: the model cannot be loaded, and one line on
stderr says why.
"""

import ctypes
import logging
import os
import pathlib
import secrets
import signal
import sys
import time

import msgspec

from weft.engine.core.engine import RejectedError
from weft.engine.core.output_collector import Outputs
from weft.engine.core.scheduler import ScheduledStep
from weft.engine.run.crash_record import CrashRecord, Fingerprint, fingerprint
from weft.engine.run.load_progress import LoadProgress
from weft.engine.run.server_link import ServerLink
from weft.engine.run.stall import StallRule
from weft.engine.run.startup import Started, start
from weft.engine.shared import logs
from weft.engine.shared.errors import ModelError
from weft.engine.shared.garbage import collect_rarely
from weft.engine.shared.messages import (
    SOCKET_NAME,
    STATUS_NAME,
    AbortRequest,
    Accepted,
    AddRequest,
    EngineOptions,
    Rejected,
    RejectReason,
    ToEngine,
)
from weft.engine.shared.status_page import Status, StatusPage
from weft.engine.step.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

EXIT_CANNOT_LOAD = 2
_PR_SET_PDEATHSIG = 1
_STUCK_POLL_S = 0.005
"""Pause when requests wait but none can run, which only another message can change."""


class EngineProcess:
    """Glue between sockets, engine, status page and crash record."""

    def __init__(self, runtime_dir: pathlib.Path, options: EngineOptions) -> None:
        """Load the model; servers can connect when this returns.

        Raises:
            ModelError: The model cannot be loaded.
        """
        self._record = CrashRecord(runtime_dir)
        self._page = StatusPage(runtime_dir / STATUS_NAME)
        self._epoch_id = secrets.randbits(63) | 1
        self._fingerprints: dict[tuple[int, int], Fingerprint] = {}
        self._have_run: set[tuple[int, int]] = set()  # which of them were in a step that has ended
        self._left: set[tuple[int, int]] = set()  # which of them, or a choice of them, ended
        self._page.write(Status(epoch_id=self._epoch_id, progress_time=time.monotonic()))
        progress = LoadProgress(self._page)
        started = start(options, f"{self._epoch_id:016x}", progress=progress, before_launch=self._before_launch)
        _announce(started, options)
        self._engine = started.engine
        self._link = ServerLink(runtime_dir / SOCKET_NAME, started.info)
        self._num_blocks = started.info.num_blocks
        self._stall_rule = StallRule(options.stall_timeout_s, started.info.device)
        self._write_status()

    def run(self) -> None:
        """Serve for ever."""
        heartbeat_s = self._stall_rule.heartbeat_s
        is_stuck = False
        idle_since = time.monotonic()
        idle_s: float | None = 0.0  # until it can get ready for what it may be asked later
        while True:
            waits = [seconds for seconds in (idle_s, heartbeat_s) if seconds is not None]
            timeout = (_STUCK_POLL_S if is_stuck else 0.0) if self._engine.has_work else min(waits, default=None)
            messages = list(self._link.poll(timeout))
            for connection, message in messages:
                self._apply(connection, message)
            if idle_s is not None and not messages and not self._engine.has_work:
                idle_s = self._engine.prepare(time.monotonic() - idle_since)
            self._answer_compiled()
            if self._engine.has_work:
                idle_since, idle_s = time.monotonic(), 0.0
                num_steps = self._engine.num_steps
                outputs = self._engine.step()
                self._forget_ended(outputs)
                if not self._engine.has_work:
                    self._record.end_step()
                self._write_status()
                self._link.put_outputs(outputs)
                is_stuck = not self._engine.launched_steps and self._engine.num_steps == num_steps
            else:
                self._forget_ended([])
                self._record.end_step()
                self._write_status()

    def _apply(self, connection: int, message: ToEngine | None) -> None:
        if message is None:
            self._engine.abort_connection(connection)
            self._left.update(key for key in self._fingerprints if key[0] == connection)
        elif isinstance(message, AbortRequest):
            self._engine.abort(connection, message.request_id, message.index)
            self._left.add((connection, message.request_id))
        else:
            self._add(connection, message)

    def _add(self, connection: int, add: AddRequest) -> None:
        mark = fingerprint(add)
        try:
            if self._record.is_condemned(mark):
                raise RejectedError(RejectReason.POISON, "this request ended the engine twice and is not run again")
            is_accepted = self._engine.add(connection, add, runs_alone=self._record.is_suspect(mark))
        except RejectedError as error:
            self._link.put(connection, Rejected(add.request_id, error.reason, str(error)))
            return
        self._fingerprints[connection, add.request_id] = mark
        if is_accepted:
            self._link.put(connection, Accepted(add.request_id))
        else:
            self._write_suspects()

    def _answer_compiled(self) -> None:
        """Tell the servers whose grammars are compiled, and whose cannot be."""
        for compiled in self._engine.take_compiled():
            connection, request_id, _ = compiled.request.key
            if compiled.fault is None:
                self._link.put(connection, Accepted(request_id))
            else:
                self._link.put(connection, Rejected(request_id, compiled.reason, compiled.fault))
                self._left.add((connection, request_id))
        if self._engine.grammars:  # others may be being compiled now
            self._write_suspects()

    def _before_launch(self, step: ScheduledStep) -> None:
        self._write_suspects(step)
        self._write_status(step)

    def _write_suspects(self, *steps: ScheduledStep) -> None:
        """Record the steps that are about to be launched or run on the device, and whose grammar is at work."""
        requests = [s.request for step in (*self._engine.launched_steps, *steps) for s in step.requests]
        if self._engine.grammars is not None:
            requests += self._engine.grammars.requests
        keys = dict.fromkeys(request.key[:2] for request in requests)
        self._record.begin_step([self._fingerprints[key] for key in keys if key in self._fingerprints])

    def _forget_ended(self, outputs: Outputs) -> None:
        """Drop the fingerprints of requests that are gone.

        A suspect is cleared once it ran, whoever ended it: a stop string of its server or a client that left is no
        fault of it. One that is still on the device stays on record, and is cleared when its last step has ended.
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

    def _write_status(self, *steps: ScheduledStep) -> None:
        """Give a sign of life, and say how long it may take until the next; steps are about to be launched."""
        scheduler = self._engine.scheduler
        predicted_s = [scheduler.cost.predict(step.load) for step in (*self._engine.launched_steps, *steps)]
        now = time.monotonic()
        counters = scheduler.counters
        pools = scheduler.kv.pools
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
                prompt_tokens=counters.prompt_tokens,
                generation_tokens=counters.generation_tokens,
                prefix_cache_queries=counters.prefix_cache_queries,
                prefix_cache_hits=counters.prefix_cache_hits,
                num_preemptions=counters.num_preemptions,
                num_steps=self._engine.num_steps,
                step_seconds=self._engine.step_seconds,
                num_drafts=counters.num_drafts,
                num_draft_tokens=counters.num_draft_tokens,
                num_accepted_tokens=counters.num_accepted_tokens,
                prefill_tokens=counters.prefill_tokens,
                decode_tokens=counters.decode_tokens,
            )
        )


def _keys(steps: list[ScheduledStep]) -> set[tuple[int, int]]:
    """Whose requests they hold, as pairs of connection and request id."""
    return {s.request.key[:2] for step in steps for s in step.requests}


def _announce(started: Started, options: EngineOptions) -> None:
    info = started.info
    lines = [
        f"model        {pathlib.Path(options.model).name} ({info.architecture})",
        f"device       {info.device}, {info.dtype}, attention {info.attention_backend}",
        *started.plan.lines(),
        f"limits       {info.max_num_seqs} requests at once, {info.max_num_batched_tokens} tokens a step",
    ]
    for line in lines:
        logger.info(line)


def main(runtime_dir: pathlib.Path) -> int:
    """Run the engine that the supervisor describes on standard input."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    options = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineOptions)
    logs.configure(options.log_format, "engine")
    try:
        process = EngineProcess(runtime_dir, options)
    except Exception as error:
        if not isinstance(error, ModelError) and not is_out_of_memory(error):
            raise
        print(f"weft: error: {(str(error) or repr(error)).splitlines()[0]}", file=sys.stderr)
        return EXIT_CANNOT_LOAD
    collect_rarely()
    process.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
