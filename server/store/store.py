"""The store: objects of the API in one database file, which all server processes share, within bounds.

Rows are objects of the API as JSON. A row whose `parent` is another row's id is a part of it. Triggers keep count and
bytes of each tenant's rows, so that bounds are checked without reading them.

What a write returned is on the disk, and of a write that failed nothing is. Reads have a connection of their own, so
they do not wait for writes. Without a data folder everything is in a temporary one, and goes with it.
"""

import contextlib
import errno
import logging
import os
import pathlib
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from weft.engine.wire.waiting_threads import WaitingThreads
from weft.server.errors import ApiError, StorageError, StorageFullError
from weft.server.settings import Settings
from weft.server.store.transaction import Bounds, Transaction

FILE_NAME = "weft.sqlite"
TEMPORARY_MARK = ".temporary"
"""A file in a data folder that ends with its server: nothing in it needs to survive the machine."""
VERSION = 3
"""Version of the schema. A file of a later version is refused; an earlier one becomes what a new one is."""
WAL_BYTES = 4 << 20
"""The write-ahead log has this room from the start, more than SQLite fills before it begins anew: what removes rows can
be written on a full disk."""
DISK_S, LEAST_BYTES_PER_S = 60.0, 10_000_000
"""How long work on files may take, its turn included: so many seconds, and longer for many bytes. A disk may hang."""
CLOSE_S = 5.0
"""How long the end of a process waits for the last write."""
LONG_BYTES = 64 << 20
BUSY_TIMEOUT_S = 10.0
"""How long a write waits for those of other processes, the time in which it waits for those of this one included."""

MAX_THREADS, MAX_LONG_THREADS = 8, 2
"""Work on files at once, and such work on at least LONG_BYTES."""
MAX_KEPT_OBJECTS = 20_000
"""Most files, uploads and unfinished batches."""

_FULL_VACUUM = 1
"""The file shrinks with what is in it."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

T = TypeVar("T")
Work = Callable[[Transaction], T]
"""What is done with the rows in one transaction."""
_log = logging.getLogger(__name__)


class Store:
    """The data folder of a server process. Opened at first use.

    Owns the connection and the thread that uses it; the event loop never waits for a disk.
    """

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
        self._opening = threading.Lock()
        self._reader = _Line("store reads")
        self._writer = _Line("store writes")
        self._pieces = WaitingThreads("files", MAX_THREADS)
        self._whole_files = WaitingThreads("whole files", MAX_LONG_THREADS)

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
        return (
            self._reader.is_open
            or self._writer.is_open
            or (self._data_dir is not None and (pathlib.Path(self._data_dir) / FILE_NAME).exists())
        )

    async def read(self, work: Work[T]) -> T:
        """Call `work` in the thread for reads; it sees one state of the database, with all writes that have returned.

        Raises:
            ApiError: `work` raised it, or the store cannot be read.
        """
        return await self._reader.run(self._open, partial(self._transact, work, is_write=False))

    async def write(self, work: Work[T], *, may_exceed: bool = False) -> T:
        """Call `work` in the thread for writes. All that it writes becomes durable, or nothing.

        Args:
            may_exceed: The write is not refused because of the bounds; for what is on the disk anyway.

        Raises:
            ApiError: `work` raised it, there is no room, or the store cannot be written.
        """
        return await self._writer.run(self._open, partial(self._transact, work, is_write=True, may_exceed=may_exceed))

    async def has_room(self, tenant: str) -> bool:
        """Whether files and batches, all and this tenant's, are within their bounds."""
        return await self.read(lambda transaction: transaction.exceeded(tenant)) is None

    async def run(self, work: Callable[[], T], num_bytes: int = 0) -> T:
        """Call a function on files in a thread. Its failures become API errors.

        Args:
            num_bytes: What it reads and writes at most. Work on much has threads of its own, so that it delays only
                other such work.

        Raises:
            ApiError: `work` raised it, its files cannot be used, or it takes longer than DISK_S and num_bytes allow.
                Then it goes on, if it has begun.
        """
        threads = self._pieces if num_bytes < LONG_BYTES else self._whole_files
        return await _done_in(threads, work, DISK_S + num_bytes / LEAST_BYTES_PER_S)

    def close(self) -> None:
        """Wait for the last write, and close the database."""
        self._reader.close()
        self._writer.close()

    def _open(self, timeout_s: float) -> sqlite3.Connection:
        with self._opening:  # the first of the two makes the folder
            is_durable = not (self.folder / TEMPORARY_MARK).exists()
            return open_database(self.folder, is_durable=is_durable, timeout_s=timeout_s)

    def _transact(
        self, work: Work[T], connection: sqlite3.Connection, *, is_write: bool, may_exceed: bool = False
    ) -> T:
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


_Connect = Callable[[float], sqlite3.Connection]


async def _done_in(threads: WaitingThreads, work: Callable[[], T], timeout_s: float) -> T:
    """Call a function in a thread; an error if it, and what comes before it there, is not done in time."""
    import asyncio  # the supervisor opens the database as well, and its start would wait for this

    try:
        async with asyncio.timeout(timeout_s):  # unlike wait_for of Python 3.11, it never swallows a cancellation
            return await asyncio.wrap_future(threads.submit(partial(_translated, work)))
    except TimeoutError:
        _log.error("the data folder does not answer within %g s", timeout_s)
        raise StorageError(f"the server's data folder does not answer within {timeout_s:g} s") from None


class _Line:
    """One thread at a time with a connection to the database, which it opens at first use."""

    def __init__(self, name: str) -> None:
        self._thread = WaitingThreads(name, 1)
        self.connection: sqlite3.Connection | None = None

    @property
    def is_open(self) -> bool:
        return self.connection is not None

    async def run(self, connect: _Connect, work: Callable[[sqlite3.Connection], T]) -> T:
        """Call `work` after what came before it. Together the two waits, here and for others, are bounded."""
        in_time = partial(self._in_time, connect, work, time.monotonic() + BUSY_TIMEOUT_S)
        return await _done_in(self._thread, in_time, DISK_S)

    def _in_time(self, connect: _Connect, work: Callable[[sqlite3.Connection], T], deadline: float) -> T:
        # One that has waited for its turn does not wait as long again: a hundred of them would each take their time.
        timeout_s = max(0.0, deadline - time.monotonic())
        if self.connection is None:
            self.connection = connect(timeout_s)
        self.connection.execute(f"PRAGMA busy_timeout = {int(1000 * timeout_s)}")
        return work(self.connection)

    def close(self) -> None:
        with contextlib.suppress(TimeoutError):  # the disk hangs
            self._thread.submit(self._close).result(CLOSE_S)

    def _close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


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


_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  kind TEXT NOT NULL, id TEXT NOT NULL, tenant TEXT NOT NULL, parent TEXT NOT NULL,
  created INTEGER NOT NULL, used REAL NOT NULL, expires INTEGER, is_kept INTEGER NOT NULL,
  size INTEGER NOT NULL, data BLOB NOT NULL, content_checksum INTEGER, checksum INTEGER,
  UNIQUE (id, kind));
CREATE INDEX IF NOT EXISTS by_list ON objects (kind, tenant, parent, number);
CREATE INDEX IF NOT EXISTS by_parent ON objects (parent) WHERE parent <> '';
CREATE INDEX IF NOT EXISTS by_use ON objects (used) WHERE parent = '' AND NOT is_kept;
CREATE INDEX IF NOT EXISTS by_tenant ON objects (tenant, used) WHERE parent = '' AND NOT is_kept;
CREATE INDEX IF NOT EXISTS by_expiry ON objects (expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS events (
  owner TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, checksum INTEGER,
  PRIMARY KEY (owner, number)) WITHOUT ROWID;
DROP TRIGGER IF EXISTS added;
DROP TRIGGER IF EXISTS removed;
DROP TRIGGER IF EXISTS changed;
DROP TABLE IF EXISTS totals;
CREATE TABLE totals (
  is_kept INTEGER NOT NULL, tenant TEXT NOT NULL, count INTEGER NOT NULL, size INTEGER NOT NULL,
  PRIMARY KEY (is_kept, tenant)) WITHOUT ROWID;
INSERT INTO totals SELECT is_kept, tenant, count(*), sum(size) FROM objects GROUP BY is_kept, tenant;
CREATE TRIGGER added AFTER INSERT ON objects BEGIN
  INSERT INTO totals VALUES (NEW.is_kept, NEW.tenant, 1, NEW.size)
    ON CONFLICT DO UPDATE SET count = count + 1, size = size + NEW.size;
END;
CREATE TRIGGER removed AFTER DELETE ON objects BEGIN
  UPDATE totals SET count = count - 1, size = size - OLD.size WHERE is_kept = OLD.is_kept AND tenant = OLD.tenant;
  DELETE FROM events WHERE owner = OLD.id;
  DELETE FROM objects WHERE parent = OLD.id AND parent <> '';
END;
CREATE TRIGGER changed AFTER UPDATE OF size, is_kept ON objects BEGIN
  UPDATE totals SET count = count - 1, size = size - OLD.size WHERE is_kept = OLD.is_kept AND tenant = OLD.tenant;
  INSERT INTO totals VALUES (NEW.is_kept, NEW.tenant, 1, NEW.size)
    ON CONFLICT DO UPDATE SET count = count + 1, size = size + NEW.size;
END;
"""


def open_database(folder: pathlib.Path, *, is_durable: bool, timeout_s: float = BUSY_TIMEOUT_S) -> sqlite3.Connection:
    """Open the database in a folder; makes both if they are missing. Only this user can read them.

    Args:
        is_durable: A commit waits for the disk. Without it, commits survive the death of processes, not of the machine.

    Raises:
        OSError: The folder cannot be made.
        sqlite3.Error: The database cannot be opened, or is of a later version.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / FILE_NAME
    path.touch(mode=0o600)
    connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    try:
        if connection.execute("PRAGMA auto_vacuum").fetchone() != (_FULL_VACUUM,):  # to ask takes no lock
            connection.execute(f"PRAGMA auto_vacuum = {_FULL_VACUUM}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA recursive_triggers = ON")  # a row's parts may have parts
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        connection.execute(f"PRAGMA synchronous = {'FULL' if is_durable else 'OFF'}")
        _make_schema(connection, path.with_name(f"{FILE_NAME}-wal"))
    except BaseException:
        connection.close()
        raise
    return connection


def _make_schema(connection: sqlite3.Connection, wal: pathlib.Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == VERSION and wal.exists() and wal.stat().st_size >= WAL_BYTES:
        return  # nobody's write is waited for
    connection.execute("BEGIN IMMEDIATE")  # one process makes it, others wait
    try:
        with contextlib.suppress(OSError), wal.open("r+b") as file:  # on a full disk, it may be mended later
            os.posix_fallocate(file.fileno(), 0, WAL_BYTES)
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise sqlite3.DatabaseError(f"the database has version {version}, this Weft knows up to {VERSION}")
        if version < VERSION:
            for statement in _statements():
                connection.execute(statement)
            _add_columns(connection)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _add_columns(connection: sqlite3.Connection) -> None:
    """Give the tables of an earlier version what they lack."""
    for table, column in (("objects", "content_checksum"), ("objects", "checksum"), ("events", "checksum")):
        known = {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}
        if column not in known:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} INTEGER")


def _statements() -> list[str]:
    """The statements of the schema; `executescript` would commit between them."""
    statements, text = [], ""
    for line in _SCHEMA.splitlines(keepends=True):
        text += line
        if sqlite3.complete_statement(text):
            statements.append(text)
            text = ""
    return statements
