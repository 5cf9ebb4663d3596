"""The database file under the data folder: opening, schema, version.

One file, which all server processes open. Rows are objects of the API as JSON; a row whose `parent` is another row's id
is a part of it. Triggers keep count and bytes of each tenant's rows, so that bounds are checked without reading them.
"""

import contextlib
import os
import pathlib
import sqlite3

FILE_NAME = "weft.sqlite"
TEMPORARY_MARK = ".temporary"
"""A file in a data folder that ends with its server: nothing in it needs to survive the machine."""
VERSION = 2
"""Version of the schema. A file of a later version is refused; an earlier one becomes what a new one is."""
WAL_BYTES = 4 << 20
"""The write-ahead log has this room from the start, more than SQLite fills before it begins anew: what removes rows can
be written on a full disk."""
BUSY_TIMEOUT_S = 10.0
"""How long a process waits for another's write."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  kind TEXT NOT NULL, id TEXT NOT NULL, tenant TEXT NOT NULL, parent TEXT NOT NULL,
  created INTEGER NOT NULL, used REAL NOT NULL, expires INTEGER, is_kept INTEGER NOT NULL,
  size INTEGER NOT NULL, data BLOB NOT NULL,
  UNIQUE (id, kind));
CREATE INDEX IF NOT EXISTS by_list ON objects (kind, tenant, parent, number);
CREATE INDEX IF NOT EXISTS by_parent ON objects (parent) WHERE parent <> '';
CREATE INDEX IF NOT EXISTS by_use ON objects (used) WHERE parent = '' AND NOT is_kept;
CREATE INDEX IF NOT EXISTS by_tenant ON objects (tenant, used) WHERE parent = '' AND NOT is_kept;
CREATE INDEX IF NOT EXISTS by_expiry ON objects (expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS events (
  owner TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,
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


def open_database(folder: pathlib.Path, *, is_durable: bool) -> sqlite3.Connection:
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
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA auto_vacuum = FULL")  # the file shrinks with what is in it
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
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _statements() -> list[str]:
    """The statements of the schema; `executescript` would commit between them."""
    statements, text = [], ""
    for line in _SCHEMA.splitlines(keepends=True):
        text += line
        if sqlite3.complete_statement(text):
            statements.append(text)
            text = ""
    return statements
