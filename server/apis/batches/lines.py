"""What a batch is made of: its stored object, the lines of its input with their faults, and the journal of its results.

The object has OpenAI's shape, and a few members that clients do not see. From the journal a batch goes on after a
crash. What reads or writes files blocks: call it through `Store.run`.
"""

import errno
import logging
import os
import pathlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from weft.server.errors import MalformedBodyError, shown
from weft.server.store.contents import new_id
from weft.server.store.transaction import Row
from weft.server.task.body import check_amount

_log = logging.getLogger(__name__)

KIND = "batch"
WINDOW_S = 24 * 3600
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_HIDDEN = frozenset({"final", "result_file_ids", "output_seconds"})
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def new_batch(endpoint: str, input_file_id: str, window_s: float, **fields: Any) -> dict[str, Any]:
    """A batch that nobody has looked at. The names of its results are decided, so that every step can be repeated."""
    now = int(time.time())
    batch: dict[str, Any] = {"id": new_id("batch_"), "object": "batch", "endpoint": endpoint}
    batch |= {"input_file_id": input_file_id, "completion_window": "24h", "created_at": now}
    batch |= {"status": "validating", "expires_at": now + int(window_s), "metadata": None, "model": None}
    batch |= {f"{name}_at": None for name in _TIMES}
    batch |= {"request_counts": {"total": 0, "completed": 0, "failed": 0}, "usage": None, "errors": None}
    batch |= {"output_file_id": None, "error_file_id": None, "result_file_ids": [new_id("file-"), new_id("file-")]}
    return batch | {"output_seconds": None, "final": None} | fields


def batch_row(batch: dict[str, Any], tenant: str, num_result_bytes: int = 0) -> Row:
    """The row of a batch. Until the batch has ended it is kept, and counts for the results that are not files yet."""
    is_kept, data = batch["status"] not in ENDED, msgspec.json.encode(batch)
    size = len(data) + num_result_bytes * is_kept
    return Row(KIND, batch["id"], tenant, data, created=batch["created_at"], is_kept=is_kept, size=size)


def batch_json(row: Row) -> bytes:
    """The batch as clients see it."""
    batch = msgspec.json.decode(row.data)
    return msgspec.json.encode({name: value for name, value in batch.items() if name not in _HIDDEN})


def fault(code: str, message: str, *, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """One of a batch's errors; `line` counts from 1."""
    return {"code": code, "line": line, "message": message, "param": param}


ENDPOINTS: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("generate",),
    "/v1/completions": ("generate",),
    "/v1/responses": ("generate",),
    "/v1/messages": ("generate",),
    "/v1/embeddings": ("embed",),
    "/v1/score": ("classify", "embed"),
    "/v1/rerank": ("classify", "embed"),
    "/v1/classify": ("classify",),
    "/v1/decisions": ("generate",),
    "/v1/systemone": ("generate",),
    "/pooling": ("classify", "embed"),
}
"""What may stand in a batch, with the tasks whose models serve it."""
MAX_LINES = 50_000
MAX_ERRORS = 100
"""Most faults of an input that are told."""
MAX_CUSTOM_ID = 512
PIECE_LINES, PIECE_BYTES = 64, 1 << 20
"""Input is read in pieces of about this size."""


class InputLine(msgspec.Struct):
    """One line of the input; unknown members are ignored."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


def read_lines(path: pathlib.Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not empty with its number, from 1; of a line that is too long, only its beginning."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(max_bytes + 2):
            number += 1
            if len(line) > max_bytes + 1:
                while line[-1:] != b"\n" and (rest := file.readline(1 << 20)) and rest[-1:] != b"\n":
                    pass
            if line.strip():
                yield number, line


def take_piece(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The next lines; none at the end."""
    piece, size = [], 0
    for item in lines:
        piece.append(item)
        size += len(item[1])
        if len(piece) >= PIECE_LINES or size >= PIECE_BYTES:
            break
    return piece


def check_input(path: pathlib.Path, endpoint: str, max_bytes: int) -> tuple[int, str | None, list[dict[str, Any]]]:
    """Count the lines, and return the first one's model and the faults."""
    count, model, seen, errors = 0, None, set(), []
    for number, line in read_lines(path, max_bytes):
        count += 1
        if count > MAX_LINES:
            errors.append(fault("too_many_lines", f"a batch must have at most {MAX_LINES} lines, got more"))
            break
        wrong, custom_id, named = _check_line(line, endpoint, max_bytes)
        if wrong is None and custom_id in seen:
            wrong = ("duplicate_custom_id", f"custom_id must be unique, got {shown(custom_id)} again", "custom_id")
        seen.add(custom_id)
        model = model or named
        if wrong is not None and len(errors) < MAX_ERRORS:
            errors.append(fault(wrong[0], wrong[1], line=number, param=wrong[2]))
    if not count:
        errors.append(fault("empty_file", "a batch must have at least one line, got none"))
    return count, model, errors


def _check_line(line: bytes, endpoint: str, max_bytes: int) -> tuple[tuple[str, str, str | None] | None, str, Any]:
    """The fault of a line (code, message, param) or None, its custom_id, its model."""
    if len(line) > max_bytes + 1:
        return ("line_too_long", f"a line must have at most {max_bytes} bytes, got more", None), "", None
    try:
        check_amount(line)
        given = msgspec.json.decode(line, type=InputLine)
        body = msgspec.json.decode(given.body)
    except MalformedBodyError as exc:
        return ("invalid_json_line", exc.message, None), "", None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return ("invalid_json_line", f"not a JSON object with custom_id, method, url, body: {exc}", None), "", None
    custom_id, wrong = given.custom_id, None
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must have between 1 and {MAX_CUSTOM_ID} characters, got {len(custom_id)}"
        wrong = ("invalid_custom_id", message, "custom_id")
    elif given.method != "POST":
        wrong = ("invalid_method", f"method must be POST, got {shown(given.method)}", "method")
    elif given.url != endpoint:
        wrong = ("mismatched_url", f"url must be {endpoint}, as in the batch, got {shown(given.url)}", "url")
    elif not isinstance(body, dict):
        wrong = ("invalid_body", f"body must be an object, got {shown(body)}", "body")
    elif body.get("stream"):
        wrong = ("invalid_body", "body.stream cannot be used in a batch", "body.stream")
    elif body.get("background"):
        wrong = (
            "invalid_body",
            "body.background cannot be used in a batch: nobody would wait for it",
            "body.background",
        )
    named = body.get("model") if isinstance(body, dict) else None
    return wrong, custom_id, named if isinstance(named, str) else None


class Journal:
    """Results of one batch in two files: answers, and errors. Owned by the process that runs the batch.

    A result is one line, appended and synced. A line that a crash cut in the middle, or that cannot be read, is removed
    with all behind it, and their requests are done again.

    Attributes:
        done: Numbers of the lines that have a result.
        counts: Number of answers and of errors.
        usage: Tokens of all answers.
        num_bytes: Size of both files.
    """

    def __init__(self, paths: tuple[pathlib.Path, pathlib.Path]) -> None:
        """Open both; cut what a crash left unfinished."""
        self.done: set[int] = set()
        self.counts = [0, 0]
        self.usage = Usage()
        self.num_bytes = 0
        self._files: list[int] = []
        self._lock = threading.Lock()
        paths[0].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            for is_error, path in enumerate(paths):
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
                self._files.append(file)
                os.ftruncate(file, self._read(path, is_error))
        except BaseException:
            self.close()
            raise

    def _read(self, path: pathlib.Path, is_error: int) -> int:
        """Take in the results that are there; return their bytes."""
        size = 0
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                try:
                    self._note(msgspec.json.decode(line), is_error)
                except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
                    _log.error("%s is damaged at byte %d; what stands from there is done again", path, size)
                    break
                size += len(line)
        self.num_bytes += size
        return size

    def _note(self, result: dict[str, Any], is_error: int) -> None:
        number = int(result["id"].rpartition("_")[2])
        if not is_error:
            self.usage.add(result["response"]["body"])
        self.done.add(number)
        self.counts[is_error] += 1

    def append(self, lines: Sequence[bytes], *, is_error: bool) -> None:
        """Add results and wait until they are on the disk. Nothing of them is there if this fails.

        Raises:
            OSError: They cannot be written.
            ValueError: One is not a line of JSON, so nothing could read it again.
        """
        results, data, file = [msgspec.json.decode(line) for line in lines], b"".join(lines), self._files[is_error]
        if data.count(b"\n") != len(lines):
            raise ValueError("a result must be one line")
        with self._lock:
            size = os.fstat(file).st_size
            try:
                if os.write(file, data) != len(data):
                    raise OSError(errno.ENOSPC, "only a part was written")
                os.fsync(file)
            except OSError:
                os.ftruncate(file, size)
                raise
            self.num_bytes += len(data)
            for result in results:
                self._note(result, is_error)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file)


class Usage:
    """The sum of the answers' usage, in the names of batches."""

    def __init__(self) -> None:
        self.input_tokens = self.cached_tokens = self.output_tokens = self.reasoning_tokens = 0

    def add(self, body: dict[str, Any]) -> None:
        """Count an answer of any endpoint."""
        usage = body.get("usage") or {}
        self.input_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        self.output_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        given = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        made = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        self.cached_tokens += given.get("cached_tokens") or 0
        self.reasoning_tokens += made.get("reasoning_tokens") or 0

    def shown(self) -> dict[str, Any]:
        """As in a batch object."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }
