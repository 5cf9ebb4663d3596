"""Contents of files and of parts of uploads, on the disk.

Each content is a file of the data folder, named by its id; what is known about it is a row of the store. A row is
written only once its content is on the disk, with its length and checksum, without which nobody gets the content.
Content without a row was left by a process that died, or its row expired; `sweep` removes it. What is not `async` here
blocks: call it through `Store.run`.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import pathlib
import secrets
import time
import zlib
from collections.abc import Iterable
from typing import BinaryIO

import msgspec

from weft.server.errors import ApiError, InvalidRequestError, NotFoundError, StorageError, shown
from weft.server.store.store import Store
from weft.server.store.transaction import Row, Transaction

_log = logging.getLogger(__name__)

FILES = "files"
"""Folder of the contents in the data folder."""
ABANDONED_S = 3600.0
"""Content without a row is left alone for so long: its upload may still run."""
COPY_BYTES = 1 << 20
ARRIVAL = "arrival"
"""The kind of rows that keep room for content while it arrives."""
ROOM_BYTES = 16 << 20
"""Room for content whose size nobody has told is kept in such steps."""


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(12)}"


def content_path(store: Store, id: str) -> pathlib.Path:
    """Where the content of a file, or of a part of an upload, is."""
    return store.folder / FILES / id


class Content:
    """Content that is being written. Either `finish` or `discard` ends it.

    Attributes:
        size, checksum: Of what was written until now; the checksum is CRC-32.
    """

    def __init__(self, path: pathlib.Path) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
        self._path = path
        self._file = open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
        self.size = self.checksum = 0

    def write(self, data: bytes) -> None:
        """Append."""
        self._file.write(data)
        self.size += len(data)
        self.checksum = zlib.crc32(data, self.checksum)

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


def open_content(store: Store, row: Row) -> BinaryIO:
    """Open the content of a row, which can be read to its end whatever becomes of its name meanwhile.

    Raises:
        NotFoundError: It is gone.
        StorageError: It is not what was written.
    """
    try:
        file = content_path(store, row.id).open("rb")
    except FileNotFoundError:
        raise NotFoundError(f"the content of the {row.kind} is gone: {shown(row.id)}", param=f"{row.kind}_id") from None
    try:
        size = os.fstat(file.fileno()).st_size
        if size != row.size - 1 or row.content_checksum not in (None, checksum_of(file)):
            _log.error("the content of %s %s is damaged", row.kind, row.id)
            raise StorageError(f"the content of the {row.kind} {shown(row.id)} is damaged on the server's disk")
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def checksum_of(file: BinaryIO) -> int:
    """CRC-32 of what is left of a file."""
    checksum = 0
    while data := file.read(COPY_BYTES):
        checksum = zlib.crc32(data, checksum)
    return checksum


def join(store: Store, parts: Iterable[Row], content: Content, md5: str | None) -> None:
    """Make the content of the parts, and finish it; all at once, so that few copies are under way.

    Raises:
        InvalidRequestError: It has another md5.
        ApiError: As `open_content` does.
    """
    digest = hashlib.md5(usedforsecurity=False)
    for part in parts:
        with open_content(store, part) as file:
            while data := file.read(COPY_BYTES):
                content.write(data)
                if md5 is not None:
                    digest.update(data)
    if md5 is not None and md5.lower() != (found := digest.hexdigest()):
        raise InvalidRequestError(f"md5 must be that of the file, {found}, got {shown(md5)}", param="md5")
    content.finish()


async def discard(store: Store, content: Content) -> None:
    """Remove content without its disk stopping the event loop. What is still writing it stops."""
    with contextlib.suppress(ApiError):  # swept later
        await asyncio.shield(store.run(content.discard))


class Arrival:
    """Content that arrives. What is under way counts as what is stored: it has a row of its own from its second MB on.

    Either `stored` or `drop` ends it. The row of a process that died expires.
    """

    def __init__(self, store: Store, id: str, tenant: str, expected: int) -> None:
        """Expect so many bytes."""
        self.id = id
        self._store, self._tenant, self._expected = store, tenant, expected
        self._used = self._reserved = 0

    async def take(self, num_bytes: int) -> None:
        """Reserve room for more.

        Raises:
            StorageFullError: There is none.
        """
        self._used += num_bytes
        if self._used <= max(self._reserved, COPY_BYTES):
            return
        self._reserved = max(self._expected, -(-self._used // ROOM_BYTES) * ROOM_BYTES)
        expires = int(time.time() + ABANDONED_S)
        row = Row(ARRIVAL, self.id, self._tenant, b"{}", expires=expires, is_kept=True, size=self._reserved + 1)
        await self._store.write(lambda transaction: transaction.put(row))

    def stored(self, transaction: Transaction) -> None:
        """Give the room back in the transaction that stores the content's row."""
        if self._reserved:
            transaction.delete(ARRIVAL, self.id, self._tenant)

    async def drop(self) -> None:
        """Give the room back: the content is discarded."""
        if self._reserved:
            with contextlib.suppress(ApiError):  # it expires
                await asyncio.shield(self._store.write(self.stored, may_exceed=True))


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


def file_row(id: str, tenant: str, checksum: int, **fields: object) -> Row:
    """The row of a file, with the checksum of its content.

    `fields` are those of OpenAI's file object: bytes, filename, purpose, expires_at.
    """
    created = int(time.time())
    shown = {"id": id, "object": "file", "created_at": created, "status": "processed", "status_details": None, **fields}
    size, expires = fields["bytes"], fields.get("expires_at")
    assert isinstance(size, int) and (expires is None or isinstance(expires, int))
    data = msgspec.json.encode(shown)
    return Row("file", id, tenant, data, "", created, expires, is_kept=True, size=size + 1, content_checksum=checksum)


async def sweep(store: Store) -> None:
    """Remove content that has no row, once nobody can be writing it any more."""
    ids = await store.read(lambda transaction: transaction.ids("file", "part"))

    def remove() -> None:
        folder = store.folder / FILES
        for path in folder.iterdir() if folder.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # others remove contents, too
                if path.name not in ids and path.stat().st_mtime < time.time() - ABANDONED_S:
                    path.unlink()

    await store.run(remove)
