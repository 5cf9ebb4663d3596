"""Files of an API key: the bodies that ask for them, their contents on the disk, and the form that brings them.

Each content is a file of the data folder, named by its id; what is known about it is a row of the store. A row is
written only once its content is on the disk. Content without a row was left by a process that died, or its row expired;
`sweep` removes it. What is not `async` here blocks: call it through `Store.run`.
"""

import contextlib
import os
import pathlib
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Literal

import msgspec
from pydantic import ConfigDict, Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from weft.server.errors import BodyTooLargeError, InvalidRequestError, MalformedBodyError, shown
from weft.server.store.store import Store
from weft.server.store.transaction import Row, Transaction
from weft.server.task.schema import Text, WireModel

Purpose = Literal["batch", "user_data"]
"""What a file may be for. OpenAI has more purposes, for what Weft does not do."""


class ExpiresAfter(WireModel):
    """When a file goes."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class UploadBody(WireModel):
    """POST /v1/uploads."""

    bytes: int = Field(ge=1)
    filename: Text = Field(min_length=1, max_length=255)
    mime_type: Text = Field(max_length=255)
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class CompleteBody(WireModel):
    """POST /v1/uploads/{id}/complete."""

    part_ids: list[Text] = Field(max_length=10_000)
    md5: Text | None = None


class BatchBody(WireModel):
    """POST /v1/batches."""

    input_file_id: Text
    endpoint: Text
    completion_window: Literal["24h"]
    metadata: dict[Text, Text] | None = None
    output_expires_after: ExpiresAfter | None = None


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


MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
PIECE_BYTES = 1 << 20
"""The file is written in pieces of about this size."""


class Form:
    """What came: texts by name, the file's name, and its content, which the caller keeps or discards."""

    def __init__(self, file_field: str, content: Content, max_file_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.content = content
        self._file_field = file_field
        self._max_file_bytes = max_file_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._header = self._value = self._name = b""
        self._disposition = b""
        self._text = bytearray()
        self._is_file = False
        self.is_whole = False

    @property
    def callbacks(self) -> dict[str, object]:
        """What the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header,
            "on_header_value": self._on_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._on_data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def take(self, least: int) -> bytes:
        """What has arrived of the file since the last call, once that is at least so much."""
        if sum(map(len, self._pieces)) < least:
            return b""
        data, self._pieces = b"".join(self._pieces), []
        return data

    def _begin(self) -> None:
        self._header = self._value = self._disposition = b""
        self._text = bytearray()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name, filename = options.get(b"name", b""), options.get(b"filename")
        self._is_file = self._name.decode("utf-8", "replace") == self._file_field
        if self._is_file:
            if self.filename is not None:
                raise InvalidRequestError(f"{self._file_field} must be sent once", param=self._file_field)
            self.filename = (filename or b"upload").decode("utf-8", "replace")[:255]
        elif len(self.fields) >= MAX_FIELDS:
            raise MalformedBodyError(f"the form must have at most {MAX_FIELDS} fields, got more")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._num_bytes += end - start
            if self._num_bytes > self._max_file_bytes:
                raise BodyTooLargeError(f"a file must have at most {self._max_file_bytes} bytes, got more")
            self._pieces.append(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > MAX_FIELD_BYTES:
            name = self._name.decode("utf-8", "replace")
            raise InvalidRequestError(f"{shown(name)} must have at most {MAX_FIELD_BYTES} bytes, got more", param=name)

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._name.decode("utf-8", "replace")] = self._text.decode("utf-8", "replace")

    def _finish(self) -> None:
        self.is_whole = True


async def read_form(request: Request, store: Store, id: str, file_field: str, max_file_bytes: int) -> Form:
    """Read a multipart form with one file, which goes to the disk while it arrives; memory holds a few pieces of it.

    The file is then on the disk as the content of `id`, and nothing of it if this fails.

    Raises:
        ApiError: It is not such a form, too large, or the disk is full.
        ClientDisconnect: The client left.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise MalformedBodyError("the body was not read: the Content-Type header must be multipart/form-data")
    content = await store.run(partial(Content, content_path(store, id)))
    try:
        form = Form(file_field, content, max_file_bytes)
        try:
            parser = MultipartParser(options[b"boundary"], form.callbacks)  # type: ignore[arg-type]
            async for chunk in _pieces(request):
                parser.write(chunk)
                if data := form.take(PIECE_BYTES):
                    await store.run(partial(content.write, data))
        except FormParserError as exc:
            raise MalformedBodyError(f"the body is not a valid form: {exc}") from None
        if not form.is_whole:
            raise MalformedBodyError("the body is not a valid form: it ends in the middle")
        if form.filename is None:
            raise InvalidRequestError(f"{file_field} is required", param=file_field)
        await store.run(partial(content.write, form.take(0)))
        await store.run(content.finish)
    except BaseException:
        content.discard()
        raise
    return form


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        for start in range(0, len(chunk), PIECE_BYTES):
            yield chunk[start : start + PIECE_BYTES]
