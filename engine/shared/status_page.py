"""A page of shared memory that says how the engine is, readable while its loop hangs or after its death.

The engine process writes it around every step; servers and the supervisor read it for `/health`, `/ready` and
`/metrics` without asking the engine. A version number that is odd while a write is under way makes a read
consistent (seqlock). One file in the runtime directory; it outlives the engine process. Imports no torch.
"""

import mmap
import operator
import os
import pathlib
import struct
import time
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Status:
    """One reading of the page. Counters run from the start of this engine process.

    Attributes:
        epoch_id: Changes with every engine process; 0 means that no engine has written yet.
        is_ready: 1 once requests are served, 0 while loading and after an orderly end.
        progress_time: `time.monotonic` of the last sign of progress.
        has_work: 1 while requests run or wait.
        loaded_bytes, total_bytes: Of the weights, while they load; 0 before and after.
        prefill_tokens: Computed by steps as prefill: with what was recomputed, without what the prefix cache held.
        decode_tokens: Computed by steps as decodes, rejected drafts included.
        stall_time: `time.monotonic` from which on an engine that has written nothing more hangs; 0: it is not judged.
    """

    epoch_id: int = 0
    is_ready: int = 0
    progress_time: float = 0.0
    has_work: int = 0
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    loaded_bytes: int = 0
    total_bytes: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    stall_time: float = 0.0

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has been silent for longer than it said that it would be."""
        return 0.0 < self.stall_time <= time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return bool(self.is_ready) and not self.is_stalled


_VERSION_BYTES = 8
_BODY = struct.Struct("=" + "".join("d" if f.type in (float, "float") else "Q" for f in fields(Status)))
_SIZE = _VERSION_BYTES + _BODY.size
_values = operator.attrgetter(*(f.name for f in fields(Status)))

_NUM_SPINS = 100
_NUM_TRIES = 200
_PAUSE_S = 5e-4
"""A reader tries this often, first at once, then with pauses: some 60 ms, when the writer died while writing."""


class StatusPage:
    """The page itself. One writer (the engine process); any number of readers."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the page at path; create it, all zero, when it is missing. Raises OSError when there is no room."""
        file = os.open(pathlib.Path(path), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(file, 0, _SIZE)  # a page of memory that finds no room on a full disk kills who writes it
            self._map = mmap.mmap(file, _SIZE)
        finally:
            os.close(file)
        # One store of eight bytes. `struct.pack_into` clears its target first, so that readers would see a zero.
        self._version = memoryview(self._map)[:_VERSION_BYTES].cast("Q")

    def write(self, status: Status) -> None:
        """Replace the whole reading."""
        body = _BODY.pack(*_values(status))
        version = self._version[0] | 1  # odd: a write is under way (or the last writer died in one)
        self._version[0] = version
        self._map[_VERSION_BYTES:_SIZE] = body
        self._version[0] = version + 1

    def read(self) -> Status:
        """Return the latest whole reading; the last one written in part if its writer died while writing."""
        for attempt in range(_NUM_TRIES):
            if attempt >= _NUM_SPINS:
                time.sleep(_PAUSE_S)  # the writer lost its CPU in the middle of a write
            before = self._version[0]
            values = _BODY.unpack_from(self._map, _VERSION_BYTES)
            if before == self._version[0] and before % 2 == 0:
                break
        return Status(*values)

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._version.release()
        self._map.close()
