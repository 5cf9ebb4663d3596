"""Runs batches, one at a time and oldest first, a bounded number of lines at once, with what capacity others leave.

Of all processes over a data folder, the one that holds its lock runs them; the kernel gives the lock back with the
process. Owns what a batch becomes: validating, in_progress, finalizing, and an end. Every step can be repeated after a
crash: results are in the journal, and what the files are called was decided when the batch was made.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import pathlib
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import islice
from typing import Any

import msgspec
from starlette.types import ASGIApp

from weft.server.batch.call import Reply, call
from weft.server.batch.lines import InputLine, Journal, check_input, read_lines
from weft.server.errors import ApiError, StorageError
from weft.server.http.context import ServerContext
from weft.server.store.files import content_path, file_row, sync_folder
from weft.server.store.transaction import Row, Transaction

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
POLL_S = 2.0
WATCH_S = 0.5
"""How often a running batch looks whether it was cancelled, and shows its counts."""
LONGEST_PAUSE_S = 30.0
"""Between two tries of a request that the server is too busy for."""
_BUSY = frozenset({429, 503})
_log = logging.getLogger(__name__)


def batch_row(batch: dict[str, Any], tenant: str) -> Row:
    """The row of a batch. It is kept until the batch has ended."""
    is_kept = batch["status"] not in ENDED
    return Row("batch", batch["id"], tenant, msgspec.json.encode(batch), created=batch["created_at"], is_kept=is_kept)


def journal_paths(context: ServerContext, batch_id: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Where answers and errors are until the batch ends."""
    folder = context.store.folder / "batches"
    return folder / f"{batch_id}.answers", folder / f"{batch_id}.errors"


class BatchRunner:
    """The task of one server process that runs batches."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context
        self._store = context.store
        self._appends: set[asyncio.Task[None]] = set()
        self._lock: int | None = None  # the file whose lock this process holds

    async def run(self) -> None:
        """Run batches until the process drains or this is cancelled."""
        try:
            while not self._context.lifecycle.draining:
                try:
                    if self._store.is_used and self._holds_lock() and (row := await self._store.read(_oldest)):
                        await self._advance(row)
                        continue
                except (
                    ApiError,
                    OSError,
                ) as exc:  # for example a full disk: what is done is kept, the rest comes later
                    _log.warning("batches have to wait: %s", exc)
                await asyncio.sleep(POLL_S)
        finally:
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

    async def _advance(self, row: Row) -> None:
        batch = msgspec.json.decode(row.data)
        if batch["status"] == "validating":
            await self._validate(row, batch)
        elif batch["status"] == "in_progress":
            await self._run_lines(row, batch)
        else:
            await self._end(row, batch)

    async def _change(self, row: Row, status: str | None = None, **fields: Any) -> dict[str, Any]:
        """Change fields of a batch. `status` is not set if the batch was cancelled meanwhile."""

        def change(transaction: Transaction) -> dict[str, Any]:
            found = transaction.get("batch", row.id, row.tenant)
            assert found is not None, "unfinished batches are kept"
            batch: dict[str, Any] = msgspec.json.decode(found.data)
            batch.update(fields)
            if status is not None and batch["status"] not in ("cancelling", "cancelled"):
                batch["status"] = status
                batch[f"{status}_at"] = int(time.time())
            transaction.put(batch_row(batch, row.tenant))
            return batch

        return await self._store.write(change)

    async def _validate(self, row: Row, batch: dict[str, Any]) -> None:
        path, max_bytes = content_path(self._store, batch["input_file_id"]), self._context.settings.max_body_bytes
        try:
            count, model, errors = await asyncio.to_thread(check_input, path, batch["endpoint"], max_bytes)
        except FileNotFoundError:
            fault = {"code": "no_input", "line": None, "message": "the input file was deleted", "param": None}
            count, model, errors = 0, None, [fault]
        counts = {"total": count, "completed": 0, "failed": 0}
        if errors:
            await self._change(row, "failed", errors={"object": "list", "data": errors})
        else:
            await self._change(row, "in_progress", model=model, request_counts=counts)

    # --- the lines ------------------------------------------------------------------------------------------------

    async def _run_lines(self, row: Row, batch: dict[str, Any]) -> None:
        journal = await self._store.run(partial(Journal, journal_paths(self._context, row.id)))
        lines: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(self._context.settings.batch_lines)
        workers = [
            asyncio.create_task(self._work(row, batch, journal, lines))
            for _ in range(self._context.settings.batch_lines)
        ]
        feeding = asyncio.create_task(self._feed(batch, journal, lines, len(workers)))
        watching = asyncio.create_task(self._watch(row, batch, journal))
        all_done = asyncio.gather(feeding, *workers)
        try:
            await asyncio.wait((all_done, watching), return_when=asyncio.FIRST_COMPLETED)
            final = watching.result() if watching.done() else "completed"
            if final == "completed":
                await all_done  # raises what went wrong
        finally:
            for task in (all_done, watching):
                task.cancel()
            await asyncio.gather(feeding, watching, *workers, return_exceptions=True)
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await all_done
            await asyncio.gather(*self._appends, return_exceptions=True)
            progress = _progress(batch, journal)
            journal.close()
        await self._change(row, **progress)
        if final is not None:
            await self._change(row, "finalizing", final=final)

    async def _feed(
        self, batch: dict[str, Any], journal: Journal, lines: asyncio.Queue[tuple[int, bytes] | None], num_workers: int
    ) -> None:
        async for number, line in self._lines(batch):
            if number not in journal.done:
                await lines.put((number, line))
        for _ in range(num_workers):
            await lines.put(None)

    async def _lines(self, batch: dict[str, Any]) -> AsyncIterator[tuple[int, bytes]]:
        path = content_path(self._store, batch["input_file_id"])
        source: Iterator[tuple[int, bytes]] = read_lines(path, self._context.settings.max_body_bytes)
        while some := await self._store.run(lambda: list(islice(source, 16))):
            for item in some:
                yield item

    async def _watch(self, row: Row, batch: dict[str, Any], journal: Journal) -> str | None:
        """Return how the batch ends before all is done; None: this process drains, and another goes on."""
        shown = None
        while True:
            await asyncio.sleep(WATCH_S)
            progress = _progress(batch, journal)
            if progress != shown:
                shown = progress
                status = (await self._change(row, **progress))["status"]
            else:
                found = await self._store.read(lambda transaction: transaction.get("batch", row.id, row.tenant))
                status = msgspec.json.decode(found.data)["status"] if found else "cancelling"
            if status == "cancelling":
                return "cancelled"
            if time.time() >= batch["expires_at"]:
                return "expired"
            if self._context.lifecycle.draining:
                return None

    async def _work(
        self, row: Row, batch: dict[str, Any], journal: Journal, lines: asyncio.Queue[tuple[int, bytes] | None]
    ) -> None:
        while (item := await lines.get()) is not None:
            number, line = item
            given = msgspec.json.decode(line, type=InputLine)
            reply = await self._ask(batch["endpoint"], bytes(given.body), row.tenant)
            result = _result(row.id, number, given.custom_id, reply)
            await self._append(journal, result, is_error=reply.status >= 400)

    async def _ask(self, endpoint: str, body: bytes, tenant: str) -> Reply:
        """The answer to one line; asks again as long as the server is too busy."""
        pause_s = 0.5
        while (reply := await call(self._app, endpoint, body, tenant)).status in _BUSY:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return reply

    async def _append(self, journal: Journal, result: bytes, *, is_error: bool) -> None:
        """Keep a result, also if that has to wait for room on the disk."""
        while True:
            try:
                appending = asyncio.create_task(self._store.run(partial(journal.append, result, is_error=is_error)))
                self._appends.add(appending)
                appending.add_done_callback(self._appends.discard)
                return await asyncio.shield(appending)  # a worker that is cancelled does not end it
            except StorageError:
                await asyncio.sleep(POLL_S)

    # --- the end --------------------------------------------------------------------------------------------------

    async def _end(self, row: Row, batch: dict[str, Any]) -> None:
        """Make files of the results and end the batch; both or neither is seen."""
        final = "cancelled" if batch["status"] == "cancelling" else batch["final"]
        paths = journal_paths(self._context, row.id)
        journal = await self._store.run(partial(Journal, paths))
        try:
            if final != "completed":
                with contextlib.suppress(FileNotFoundError):  # the input was deleted
                    await self._tell_undone(row.id, batch, journal, final)
            progress = _progress(batch, journal)
        finally:
            journal.close()
        rows, ids = [], []
        kinds = zip(paths, batch["result_file_ids"], ("output", "error"), strict=True)
        for path, file_id, kind in kinds:
            size = await self._store.run(partial(_publish, path, content_path(self._store, file_id)))
            ids.append(file_id if size else None)
            if size:
                seconds = batch["output_seconds"]
                expires_at = None if seconds is None else int(time.time()) + seconds
                name = f"{row.id}_{kind}.jsonl"
                fields = {"bytes": size, "filename": name, "purpose": "batch_output", "expires_at": expires_at}
                rows.append(file_row(file_id, row.tenant, **fields))
        ended = batch | progress | {"output_file_id": ids[0], "error_file_id": ids[1]}
        ended |= {"status": final, f"{final}_at": int(time.time())}

        def end(transaction: Transaction) -> None:
            for file in rows:
                transaction.put(file)
            transaction.put(batch_row(ended, row.tenant))

        await self._store.write(end)
        for path in paths:
            await self._store.run(partial(path.unlink, missing_ok=True))

    async def _tell_undone(self, batch_id: str, batch: dict[str, Any], journal: Journal, final: str) -> None:
        async for number, line in self._lines(batch):
            if number not in journal.done:
                given = msgspec.json.decode(line, type=InputLine)
                error = {"code": f"batch_{final}", "message": f"the batch was {final} before this line", "line": number}
                result = _encode(batch_id, number, given.custom_id, None, error)
                await self._store.run(partial(journal.append, result, is_error=True))


def _oldest(transaction: Transaction) -> Row | None:
    """The unfinished batch that was made first; one to be cancelled goes before."""
    rows = [row for row in transaction.of_kind("batch") if row.is_kept]
    cancelling = [row for row in rows if msgspec.json.decode(row.data)["status"] == "cancelling"]
    return next(iter(cancelling + rows), None)


def _progress(batch: dict[str, Any], journal: Journal) -> dict[str, Any]:
    completed, failed = journal.counts
    counts = {"total": batch["request_counts"]["total"], "completed": completed, "failed": failed}
    return {"request_counts": counts, "usage": journal.usage.shown()}


def _result(batch_id: str, number: int, custom_id: str, reply: Reply) -> bytes:
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": msgspec.Raw(reply.body)}
    error = None
    if reply.status >= 400:
        fault = msgspec.json.decode(reply.body).get("error", {})
        error = {"code": fault.get("code") or fault.get("type"), "message": fault.get("message"), "line": number}
    return _encode(batch_id, number, custom_id, response, error)


def _encode(batch_id: str, number: int, custom_id: str, response: object, error: object) -> bytes:
    id = f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
    return msgspec.json.encode({"id": id, "custom_id": custom_id, "response": response, "error": error}) + b"\n"


def _publish(path: pathlib.Path, content: pathlib.Path) -> int:
    """Give results a second name, as a file's content; return their bytes. The first one goes once the row is there."""
    size = path.stat().st_size
    if size and not content.exists():
        content.parent.mkdir(mode=0o700, exist_ok=True)
        os.link(path, content)
        sync_folder(content.parent)
    return size
