"""Runs the batches of every tenant beside each other, of each the oldest, with what capacity other requests leave.

A batch goes from its first state to its end: validating, in_progress, finalizing, and an end. Every step can be
repeated after a crash: results are in the journal, and what the files are called was decided when the batch was made.

Of all processes over a data folder, the one that holds its lock runs them. The kernel gives the lock back with the
process. Whatever goes wrong with a batch ends that batch, and never the runner.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import pathlib
import time
from functools import partial
from typing import Any

import msgspec
from starlette.types import ASGIApp

from weft.server.apis.batches import lines as batch_lines
from weft.server.apis.batches.line_run import LineRun, LineSource, Slots, encode_result
from weft.server.errors import ApiError, NotFoundError, StorageError, StorageFullError
from weft.server.http.context import ServerContext
from weft.server.store.contents import checksum_of, content_path, file_row, open_content, sweep, sync_folder
from weft.server.store.transaction import Row, Transaction

_log = logging.getLogger(__name__)

WATCH_S = 0.5
"""How often a running batch looks whether it was cancelled, and shows its counts."""
_NO_INPUT = batch_lines.fault("no_input", "the input file was deleted")


class BatchRun:
    """One batch in the process that runs it: takes it from its first state to its end.

    A step that fails may be tried again, and `fail` may end the batch from any state.
    """

    def __init__(self, row: Row, app: ASGIApp, context: ServerContext, slots: Slots) -> None:
        self.row = row
        self._app = app
        self._context = context
        self._store = context.store
        self._slots = slots
        self._most = context.settings.files_max_bytes  # that its results may have
        folder = context.store.folder / "batches"
        self._paths = folder / f"{row.id}.answers", folder / f"{row.id}.errors"

    async def advance(self) -> bool:
        """Take the batch one state further; False once it has ended."""
        batch = await self._store.read(self._read)
        if batch["status"] in batch_lines.ENDED:
            return False
        if batch["status"] == "validating":
            await self._validate(batch)
        elif batch["status"] == "in_progress":
            await self._run_lines(batch)
        else:
            await self._end("cancelled" if batch["status"] == "cancelling" else batch["final"])
        return True

    async def fail(self, reason: Exception) -> None:
        """End the batch because of something that nobody can mend; what is answered becomes files if it can."""
        told = "internal_error", "an internal error ended the batch; the server's log describes it"
        if isinstance(reason, ApiError):
            told = reason.code or reason.type, reason.message
        await self._end("failed", batch_lines.fault(*told))

    def _read(self, transaction: Transaction) -> dict[str, Any]:
        found = transaction.get(batch_lines.KIND, self.row.id, self.row.tenant)
        if found is None:
            raise NotFoundError(f"the batch {self.row.id} is gone")
        return msgspec.json.decode(found.data, type=dict[str, Any])

    async def _change(self, status: str | None = None, num_result_bytes: int = 0, **fields: Any) -> dict[str, Any]:
        """Change fields of the batch. `status` is not set if it was cancelled meanwhile."""

        def change(transaction: Transaction) -> dict[str, Any]:
            batch = self._read(transaction) | fields
            if status is not None and batch["status"] not in ("cancelling", "cancelled"):
                batch |= {"status": status, f"{status}_at": int(time.time())}
            transaction.put(batch_lines.batch_row(batch, self.row.tenant, num_result_bytes))
            return batch

        return await self._store.write(change, may_exceed=True)

    async def _validate(self, batch: dict[str, Any]) -> None:
        id, max_bytes = batch["input_file_id"], self._context.settings.max_body_bytes
        row = await self._store.read(lambda transaction: transaction.get("file", id, self.row.tenant))
        try:
            if row is None:
                raise FileNotFoundError

            def check() -> tuple[int, str | None, list[dict[str, Any]]]:
                open_content(self._store, row).close()
                return batch_lines.check_input(content_path(self._store, id), batch["endpoint"], max_bytes)

            count, model, errors = await self._store.run(check, 2 * row.size)
        except (FileNotFoundError, NotFoundError):
            count, model, errors = 0, None, [_NO_INPUT]
        counts = {"total": count, "completed": 0, "failed": 0}
        if errors:
            await self._change("failed", errors={"object": "list", "data": errors})
        else:
            await self._change("in_progress", model=model, request_counts=counts)

    # --- the lines ------------------------------------------------------------------------------------------------

    async def _run_lines(self, batch: dict[str, Any]) -> None:
        if not await self._store.run(content_path(self._store, batch["input_file_id"]).exists):
            await self._end("failed", _NO_INPUT)
            return
        journal = await self._store.run(partial(batch_lines.Journal, self._paths), self._most)
        path, endpoint = content_path(self._store, batch["input_file_id"]), batch["endpoint"]
        source = LineSource(self.row.id, path, endpoint, self.row.tenant)
        lines = LineRun(source, self._app, self._context, self._slots, journal)
        feeding = asyncio.create_task(lines.feed())
        watching = asyncio.create_task(self._watch(batch, journal))
        try:
            await asyncio.wait((feeding, watching), return_when=asyncio.FIRST_COMPLETED)
            final = "completed" if feeding.done() else watching.result()
            if feeding.done():
                feeding.result()  # raises what went wrong
        finally:
            for task in (feeding, watching):
                task.cancel()
            await asyncio.gather(feeding, watching, return_exceptions=True)
            await lines.settle()
            progress, num_bytes = _progress(batch, journal), journal.num_bytes
            journal.close()
        if final is None:
            await self._change(None, num_bytes, **progress)
        else:
            await self._change("finalizing", num_bytes, **progress, final=final)

    async def _watch(self, batch: dict[str, Any], journal: batch_lines.Journal) -> str | None:
        """Return how the batch ends before all is done; None: this process drains, and another goes on."""
        told, status = None, batch["status"]
        while True:
            await asyncio.sleep(WATCH_S)
            progress = _progress(batch, journal)
            try:
                if progress != told:
                    told, status = progress, (await self._change(None, journal.num_bytes, **progress))["status"]
                else:
                    status = (await self._store.read(self._read))["status"]
                has_room = await self._store.has_room(self.row.tenant)
            except StorageError as exc:  # the lines go on; their results are not in the database
                _log.warning("the progress of %s cannot be stored: %s", self.row.id, exc)
                has_room = True
            if status == "cancelling":
                return "cancelled"
            if not has_room:
                return "failed"
            if time.time() >= batch["expires_at"]:
                return "expired"
            if self._context.lifecycle.draining:
                return None

    # --- the end --------------------------------------------------------------------------------------------------

    async def _end(self, final: str, *errors: dict[str, Any]) -> None:
        """Make files of the results and end the batch; both or neither is seen."""
        batch, told = await self._store.read(self._read), list(errors)
        if batch["status"] in batch_lines.ENDED:
            return
        if final == "failed" and not told:
            bound = "files_max_bytes, or files_key_share of it for an API key"
            told.append(batch_lines.fault("storage_full", f"the files have grown beyond their bound: {bound}"))
        try:
            progress = await self._count(batch, final)
        except Exception as exc:
            if final != "failed" and not isinstance(exc, StorageFullError):
                raise
            _log.warning("the lines of %s that have no result cannot be told: %r", self.row.id, exc)
            code = (isinstance(exc, ApiError) and exc.code) or "internal_error"
            told.append(batch_lines.fault(code, "the error file may not name every line that was not answered"))
            progress = {}  # that of the last look
        files: list[Row] = []
        for kind, path, id in zip(("output", "error"), self._paths, batch["result_file_ids"], strict=True):
            try:
                publish = partial(_publish, path, content_path(self._store, id))
                size, checksum = await self._store.run(publish, self._most)
            except StorageError as exc:
                if final != "failed":
                    raise
                where = f"they stay in batches/{path.name} in the server's data folder"
                told.append(batch_lines.fault(exc.code or exc.type, f"the results cannot become a file; {where}"))
            else:
                files += [self._result_row(id, kind, size, checksum, batch["output_seconds"])] * bool(size)
        ended = batch | progress | {"status": final, f"{final}_at": int(time.time())}
        for file in files:
            ended["output_file_id" if file.id == batch["result_file_ids"][0] else "error_file_id"] = file.id
        if told:
            ended["errors"] = {"object": "list", "data": told}

        def end(transaction: Transaction) -> None:
            for row in (*files, batch_lines.batch_row(ended, self.row.tenant)):
                transaction.put(row)

        await self._store.write(end, may_exceed=True)
        kept = {file.id for file in files}
        for path, id in zip(self._paths, batch["result_file_ids"], strict=True):
            with contextlib.suppress(StorageError):  # the batch has ended; nobody looks for them any more
                await self._store.run(partial(_remove, path, is_empty_only=id not in kept))

    def _result_row(self, id: str, kind: str, size: int, checksum: int, seconds: int | None) -> Row:
        expires_at = None if seconds is None else int(time.time()) + seconds
        fields = {"bytes": size, "filename": f"{self.row.id}_{kind}.jsonl", "purpose": "batch_output"}
        return file_row(id, self.row.tenant, checksum, **fields, expires_at=expires_at)

    async def _count(self, batch: dict[str, Any], final: str) -> dict[str, Any]:
        """The final counts. Lines that a cancelled or expired batch has not answered become errors."""
        journal = await self._store.run(partial(batch_lines.Journal, self._paths), self._most)
        try:
            if final in ("cancelled", "expired"):
                with contextlib.suppress(FileNotFoundError):  # the input was deleted
                    path = content_path(self._store, batch["input_file_id"])
                    await self._store.run(partial(self._tell_undone, path, journal, final), self._most)
            return _progress(batch, journal)
        finally:
            journal.close()

    def _tell_undone(self, path: pathlib.Path, journal: batch_lines.Journal, final: str) -> None:
        source = batch_lines.read_lines(path, self._context.settings.max_body_bytes)
        while piece := batch_lines.take_piece(source):
            results = []
            for number, line in piece:
                if number not in journal.done:
                    given = msgspec.json.decode(line, type=batch_lines.InputLine)
                    message = f"the batch was {final} before this line"
                    error = {"code": f"batch_{final}", "message": message, "line": number}
                    results.append(encode_result(self.row.id, number, given.custom_id, None, error))
            if results:
                journal.append(results, is_error=True)


def _progress(batch: dict[str, Any], journal: batch_lines.Journal) -> dict[str, Any]:
    completed, failed = journal.counts
    counts = {"total": batch["request_counts"]["total"], "completed": completed, "failed": failed}
    return {"request_counts": counts, "usage": journal.usage.shown()}


def _publish(path: pathlib.Path, content: pathlib.Path) -> tuple[int, int]:
    """Give results a second name, as a file's content; the first one goes once the row is there.

    Returns their bytes and checksum.
    """
    size = path.stat().st_size if path.exists() else 0
    if size and not content.exists():
        content.parent.mkdir(mode=0o700, exist_ok=True)
        os.utime(path)  # an old file without its row would be taken for one that was forgotten
        os.link(path, content)
        sync_folder(content.parent)
    if not size:
        return 0, 0
    with path.open("rb") as file:
        return size, checksum_of(file)


def _remove(path: pathlib.Path, *, is_empty_only: bool) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not (is_empty_only and path.stat().st_size):
            path.unlink()


POLL_S = 2.0
"""How often unfinished batches are looked for."""
SWEEP_S = 600.0
"""How often content without a row is looked for."""
MAX_BATCHES = 16
"""Most batches that run at once."""
MAX_TRIES = 5
"""A step of a batch that the data folder fails is tried so often, then the batch fails."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between tries; each pause is twice the one before."""


class BatchRunner:
    """The task of one server process that runs batches."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context
        self._store = context.store
        self._slots = Slots(context.settings.batch_lines)
        self._running: dict[str, asyncio.Task[None]] = {}  # by tenant
        self._lock: int | None = None  # the file whose lock this process holds
        self._next_sweep_s = 0.0

    async def run(self) -> None:
        """Run batches until the process drains or this is cancelled."""
        try:
            while not self._context.lifecycle.draining:
                try:
                    if self._store.is_used and self._holds_lock():
                        await self._begin()
                        if time.monotonic() >= self._next_sweep_s:
                            self._next_sweep_s = time.monotonic() + SWEEP_S
                            await sweep(self._store)
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
    rows = transaction.of_kind(batch_lines.KIND, only_kept=True)
    return sorted(rows, key=lambda row: msgspec.json.decode(row.data)["status"] != "cancelling")
