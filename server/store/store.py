"""The store: objects of the API in one database, which all server processes share, within bounds.

Owns the connection and the thread that uses it; the event loop never waits for a disk. What a write returned is on the
disk, and of a write that failed nothing is. Without a data folder everything is in a temporary one, and goes with it.
"""

import asyncio
import errno
import logging
import pathlib
import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from weft.server.errors import ApiError, StorageError, StorageFullError
from weft.server.settings import Settings
from weft.server.store.database import FILE_NAME, TEMPORARY_MARK, open_database
from weft.server.store.transaction import Bounds, Transaction

MAX_KEPT_OBJECTS = 20_000
"""Most files, uploads and unfinished batches."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Store:
    """The data folder of a server process. Opened at first use."""

    def __init__(self, settings: Settings) -> None:
        """Note where it is; `data_dir` None means a folder of this object's own."""
        self._bounds = Bounds(
            max_count=settings.store_max_objects,
            max_bytes=settings.store_max_bytes,
            max_age_s=settings.store_max_age_s,
            max_kept_count=MAX_KEPT_OBJECTS,
            max_kept_bytes=settings.files_max_bytes,
            key_share=settings.files_key_share if len(settings.api_key) > 1 else 1.0,
        )
        self._data_dir = settings.data_dir
        self._folder: pathlib.Path | None = None
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, "store")

    @property
    def folder(self) -> pathlib.Path:
        """The data folder."""
        if self._folder is None:
            if self._data_dir is None:
                self._folder = pathlib.Path(tempfile.mkdtemp(prefix="weft-data-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
                (self._folder / TEMPORARY_MARK).touch()
            else:
                self._folder = pathlib.Path(self._data_dir)
        return self._folder

    @property
    def is_used(self) -> bool:
        """Whether anything was ever stored here."""
        return self._connection is not None or (
            self._data_dir is not None and (pathlib.Path(self._data_dir) / FILE_NAME).exists()
        )

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Call `work` in the store's thread; it sees one state of the database.

        Raises:
            ApiError: `work` raised it, or the store cannot be read.
        """
        return await self._in_order(partial(self._transact, work, is_write=False))

    async def write(self, work: Callable[[Transaction], T], *, may_exceed: bool = False) -> T:
        """Call `work` in the store's thread. All that it writes becomes durable, or nothing.

        Args:
            may_exceed: The write is not refused because of the bounds; for what is on the disk anyway.

        Raises:
            ApiError: `work` raised it, there is no room, or the store cannot be written.
        """
        return await self._in_order(partial(self._transact, work, is_write=True, may_exceed=may_exceed))

    async def has_room(self, tenant: str) -> bool:
        """Whether files and batches, all and this tenant's, are within their bounds."""
        return await self.read(lambda transaction: transaction.exceeded(tenant)) is None

    async def run(self, work: Callable[[], T]) -> T:
        """Call a function on files in a thread. Its failures become API errors."""
        return await asyncio.to_thread(_translated, work)

    async def _in_order(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, _translated, work)

    def close(self) -> None:
        """Wait for the last write, and close the database."""
        self._thread.shutdown()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _transact(self, work: Callable[[Transaction], T], *, is_write: bool, may_exceed: bool = False) -> T:
        if self._connection is None:
            is_durable = not (self.folder / TEMPORARY_MARK).exists()
            self._connection = open_database(self.folder, is_durable=is_durable)
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE" if is_write else "BEGIN")
        try:
            transaction = Transaction(connection, self._bounds)
            result = work(transaction)
            if is_write:
                transaction.tidy(may_exceed=may_exceed)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return result


def _translated(work: Callable[[], T]) -> T:
    """The result of `work`. Failures of disk and database become what clients are told; the log has the details."""
    try:
        return work()
    except ApiError:
        raise
    except (OSError, sqlite3.Error) as exc:
        _log.error("the store failed: %s", exc)
        is_full = exc.errno in _FULL if isinstance(exc, OSError) else _code(exc) == sqlite3.SQLITE_FULL
        if is_full:
            raise StorageFullError("the disk of the server's data folder is full; nothing was stored") from None
        raise StorageError("the server's data folder cannot be used now; nothing was stored") from None


def _code(exc: sqlite3.Error) -> int:
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF  # the rest says more of I/O errors
