"""What is stored of a batch: its object in OpenAI's shape, with a few members that clients do not see."""

import time
from typing import Any

import msgspec

from weft.server.store.files import new_id
from weft.server.store.transaction import Row

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
    return Row(
        KIND,
        batch["id"],
        tenant,
        data,
        created=batch["created_at"],
        is_kept=is_kept,
        size=len(data) + num_result_bytes * is_kept,
    )


def batch_json(row: Row) -> bytes:
    """The batch as clients see it."""
    batch = msgspec.json.decode(row.data)
    return msgspec.json.encode({name: value for name, value in batch.items() if name not in _HIDDEN})


def fault(code: str, message: str, *, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """One of a batch's errors; `line` counts from 1."""
    return {"code": code, "line": line, "message": message, "param": param}
