"""Runs the batches of every tenant beside each other, of each the oldest, with what capacity other requests leave.

Of all processes over a data folder, the one that holds its lock runs them; the kernel gives the lock back with the
process. Whatever goes wrong with a batch ends that batch, and never the runner.
"""

import asyncio
import fcntl
import logging
import os
from functools import partial

import msgspec
from starlette.types import ASGIApp

from weft.server.batch.batch_run import BatchRun
from weft.server.batch.record import KIND
from weft.server.batch.slots import Slots
from weft.server.errors import NotFoundError, StorageError
from weft.server.http.context import ServerContext
from weft.server.store.transaction import Row, Transaction

POLL_S = 2.0
MAX_BATCHES = 16
"""Most batches that run at once."""
MAX_TRIES = 5
"""A step of a batch that the data folder fails is tried so often, then the batch fails."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between tries; each pause is twice the one before."""
_log = logging.getLogger(__name__)


class BatchRunner:
    """The task of one server process that runs batches."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context
        self._store = context.store
        self._slots = Slots(context.settings.batch_lines)
        self._running: dict[str, asyncio.Task[None]] = {}  # by tenant
        self._lock: int | None = None  # the file whose lock this process holds

    async def run(self) -> None:
        """Run batches until the process drains or this is cancelled."""
        try:
            while not self._context.lifecycle.draining:
                try:
                    if self._store.is_used and self._holds_lock():
                        await self._begin()
                except Exception as exc:  # for example a full disk: what is done is kept, the rest comes later
                    _log.warning("batches have to wait: %r", exc)
                if self._running:
                    await asyncio.wait(self._running.values(), timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(POLL_S)
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._lock is not None:
                os.close(self._lock)

    def _holds_lock(self) -> bool:
        if self._lock is None:
            file = os.open(self._store.folder / "batches.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                return False
            self._lock = file
        return True

    async def _begin(self) -> None:
        """Begin the next batch of every tenant that has none running."""
        for row in await self._store.read(_unfinished):
            if row.tenant not in self._running and len(self._running) < MAX_BATCHES:
                task = asyncio.create_task(self._run(BatchRun(row, self._app, self._context, self._slots)))
                self._running[row.tenant] = task
                task.add_done_callback(partial(self._forget, row.tenant))

    def _forget(self, tenant: str, _: object) -> None:
        del self._running[tenant]

    async def _run(self, batch: BatchRun) -> None:
        """Run a batch to its end."""
        num_tries = 0
        reason: Exception | None = None  # why it must fail
        while not self._context.lifecycle.draining:
            try:
                if reason is not None:
                    return await batch.fail(reason)
                if not await batch.advance():
                    return None
                num_tries = 0
            except NotFoundError:
                return None
            except Exception as exc:
                num_tries += 1
                is_known = isinstance(exc, StorageError)
                _log.error("%s has to wait: %r", batch.row.id, exc, exc_info=None if is_known else exc)
                if not is_known or num_tries >= MAX_TRIES:
                    reason = reason or exc
                await asyncio.sleep(min(FIRST_PAUSE_S * 2.0 ** min(num_tries - 1, 10), LONGEST_PAUSE_S))


def _unfinished(transaction: Transaction) -> list[Row]:
    """The unfinished batches, oldest first; those to be cancelled before the others."""
    rows = transaction.of_kind(KIND, only_kept=True)
    return sorted(rows, key=lambda row: msgspec.json.decode(row.data)["status"] != "cancelling")
