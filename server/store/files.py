"""Contents of files: one file of the data folder each, named by its id; what is known about it is a row of the store.

A row is written only once its content is on the disk. Content without a row was left by a process that died, or its
row expired; `sweep` removes it. Everything here blocks: call it through `Store.run`.
"""

import contextlib
import os
import pathlib
import secrets
import time
from collections.abc import Iterable

import msgspec

from weft.server.store.store import Store
from weft.server.store.transaction import Row, Transaction

FILES = "files"
"""Folder of the contents in the data folder."""
ABANDONED_S = 3600.0
"""Content without a row is left alone for so long: its upload may still run."""
COPY_BYTES = 1 << 20


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(12)}"


def content_path(store: Store, id: str) -> pathlib.Path:
    """Where the content of a file, or of a part of an upload, is."""
    return store.folder / FILES / id


class Content:
    """Content that is being written. Either `finish` or `discard` ends it."""

    def __init__(self, path: pathlib.Path) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
        self._path = path
        self._file = open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append."""
        self._file.write(data)
        self.size += len(data)

    def flush(self) -> None:
        """Hand what was written to the system, so that it can be read."""
        self._file.flush()

    def finish(self) -> None:
        """Wait until it is on the disk."""
        self.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sync_folder(self._path.parent)

    def discard(self) -> None:
        """Remove it."""
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what it still buffers may not fit
            self._file.close()


def join(parts: Iterable[pathlib.Path], content: Content) -> None:
    """Append the parts to the content."""
    for part in parts:
        with part.open("rb") as file:
            while data := file.read(COPY_BYTES):
                content.write(data)


async def remove_contents(store: Store, ids: Iterable[str]) -> None:
    """Remove content whose rows are gone. What cannot be removed now is swept later."""

    def remove() -> None:
        for id in ids:
            with contextlib.suppress(OSError):
                content_path(store, id).unlink(missing_ok=True)

    await store.run(remove)


def sync_folder(folder: pathlib.Path) -> None:
    """Wait until the names in a folder are on the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def file_row(id: str, tenant: str, **fields: object) -> Row:
    """The row of a file. `fields` are those of OpenAI's file object: bytes, filename, purpose, expires_at."""
    created = int(time.time())
    shown = {"id": id, "object": "file", "created_at": created, "status": "processed", "status_details": None, **fields}
    size, expires = fields["bytes"], fields.get("expires_at")
    assert isinstance(size, int) and (expires is None or isinstance(expires, int))
    return Row("file", id, tenant, msgspec.json.encode(shown), "", created, expires, is_kept=True, size=size + 1)


def living(transaction: Transaction) -> set[str]:
    """Ids of all content that has a row."""
    return {row.id for kind in ("file", "part") for row in transaction.of_kind(kind)}


def sweep(store: Store, ids: set[str]) -> None:
    """Remove content that is in no row; `ids` are those of rows that are alive."""
    folder = store.folder / FILES
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in ids and path.stat().st_mtime < time.time() - ABANDONED_S:
            path.unlink(missing_ok=True)
