"""Reads a multipart form with one file, which goes elsewhere while it arrives; memory holds a few pieces of it."""

import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import IO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from weft.server.errors import BodyTooLargeError, InvalidRequestError, MalformedBodyError, QueueFullError, shown

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it logs what clients send; they are told the fault

MAX_FIELDS = 16
MAX_FIELD_BYTES = 1 << 16
PIECE_BYTES = 1 << 20
"""The file is written in pieces of about this size."""
MOST_BYTES = 8 << 30
"""Of all `CountedFile`s of a process."""


class FileRoom:
    """The bytes of files that are open, of all requests."""

    def __init__(self) -> None:
        self.num_bytes = 0


class CountedFile:
    """A file without a name, whose bytes count until it is closed, or nobody has it any more."""

    def __init__(self, room: FileRoom) -> None:
        """Make an empty one."""
        self._room, self._num_bytes = room, 0
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def count(self, num_bytes: int) -> None:
        """Count some more.

        Raises:
            QueueFullError: There is no room for them.
        """
        if self._room.num_bytes + num_bytes > MOST_BYTES:
            raise QueueFullError(f"the files of all requests would have more than {MOST_BYTES} bytes; try again")
        self._room.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self.file.close()
        self._room.num_bytes -= self._num_bytes
        self._num_bytes = 0

    __del__ = close


class Form:
    """What came: texts by name, lists of texts by a name that ends with [], and the file's name."""

    def __init__(self, file_field: str, max_file_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}
        self.filename: str | None = None
        self._file_field = file_field
        self._max_file_bytes = max_file_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._header = self._value = self._name = b""
        self._disposition = b""
        self._text = bytearray()
        self._is_file = False
        self._num_parts = 0
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
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS + 1:  # whatever their names: each costs time
            raise MalformedBodyError(f"the form must have at most {MAX_FIELDS} fields beside its file, got more")
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
        name = self._name.decode("utf-8", "replace")
        self._is_file = name == self._file_field
        if name in self.fields or (self._is_file and self.filename is not None):
            raise InvalidRequestError(f"{shown(name)} must be sent once", param=name)
        if self._is_file:
            self.filename = (filename or b"upload").decode("utf-8", "replace")[:255]

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
        if self._is_file:
            return
        name, text = (each.decode("utf-8", "replace") for each in (self._name, self._text))
        if name.endswith("[]"):
            self.lists.setdefault(name, []).append(text)
        else:
            self.fields[name] = text

    def _finish(self) -> None:
        self.is_whole = True


async def read_form(
    request: Request, file_field: str, max_file_bytes: int, write: Callable[[bytes], Awaitable[None]]
) -> Form:
    """Read a form; `write` takes each piece of the file.

    Raises:
        ApiError: It is not such a form, or too large.
        ClientDisconnect: The client left.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise MalformedBodyError("the body was not read: the Content-Type header must be multipart/form-data")
    form = Form(file_field, max_file_bytes)
    try:
        parser = MultipartParser(options[b"boundary"], form.callbacks)  # type: ignore[arg-type]
        async for chunk in _pieces(request):
            parser.write(chunk)
            if data := form.take(PIECE_BYTES):
                await write(data)
    except FormParserError as exc:
        raise MalformedBodyError(f"the body is not a valid form: {exc}") from None
    if not form.is_whole:
        raise MalformedBodyError("the body is not a valid form: it ends in the middle")
    if form.filename is None:
        raise InvalidRequestError(f"{file_field} is required", param=file_field)
    await write(form.take(0))
    return form


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        for start in range(0, len(chunk), PIECE_BYTES):
            yield chunk[start : start + PIECE_BYTES]
