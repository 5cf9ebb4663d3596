"""Shares the engine's status in a page of memory, readable while the engine hangs or after it died.

The engine process writes it around every step. Servers and the supervisor read it for `/health`, `/ready` and
`/metrics` without asking the engine. What it holds is defined once, here: the layout of the page, the metrics and
`/stats` follow from `Status`. A version number is odd while a write is under way, which makes a read consistent
(seqlock). The page is one file in the runtime directory and outlives the engine process. Imports no torch.
"""

import mmap
import os
import pathlib
import struct
import time
from dataclasses import dataclass
from typing import Annotated, Final, get_origin, get_type_hints

import msgspec

from weft.engine.wire.options import AdapterUse, unpack


@dataclass(frozen=True, slots=True)
class Shown:
    """How a field of `Status` is shown.

    Attributes:
        text: Help text of the metric; empty for no metric.
        metric: Name of the metric without prefix; empty for the name of the field.
        in_stats: Whether `/stats` has the field.
    """

    text: str = ""
    metric: str = ""
    in_stats: bool = True


class Counters(msgspec.Struct, kw_only=True):
    """Totals since this engine process started.

    Attributes:
        prefill_tokens: Computed by steps as prefill: recomputed tokens included, prefix cache hits not.
        decode_tokens: Computed by steps as decodes, rejected drafts included.
        picture_seconds: That pictures were encoded for; `PICTURE_BUCKETS` has how many took how long.
    """

    prompt_tokens: Annotated[int, Shown("Prompt tokens processed.")] = 0
    generation_tokens: Annotated[int, Shown("Output tokens generated.")] = 0
    prefix_cache_queries: Annotated[int, Shown("Tokens looked up in the prefix cache.")] = 0
    prefix_cache_hits: Annotated[int, Shown("Tokens found in the prefix cache.")] = 0
    num_preemptions: Annotated[int, Shown("Times that a request lost its blocks.")] = 0
    num_steps: Annotated[int, Shown("Steps of the engine.", "engine_steps")] = 0
    num_drafts: Annotated[int, Shown("Drafts verified.", "spec_decode_num_drafts", in_stats=False)] = 0
    num_draft_tokens: Annotated[int, Shown("Tokens of drafts.", "spec_decode_num_draft_tokens", in_stats=False)] = 0
    num_accepted_tokens: Annotated[
        int, Shown("Tokens of drafts accepted.", "spec_decode_num_accepted_tokens", in_stats=False)
    ] = 0
    step_seconds: Annotated[float, Shown("Seconds that the device spent on steps.", "engine_step_seconds")] = 0.0
    prefill_tokens: Annotated[int, Shown("Tokens that steps computed as prefill.", "engine_prefill_tokens")] = 0
    decode_tokens: Annotated[int, Shown("Tokens that steps computed as decodes.", "engine_decode_tokens")] = 0
    kv_offload_kept_blocks: Annotated[int, Shown("Evicted blocks kept, in memory or for the disk.", in_stats=False)] = 0
    kv_offload_dropped_blocks: Annotated[
        int, Shown("Evicted blocks that there was no room or time to keep.", in_stats=False)
    ] = 0
    kv_offload_host_loads: Annotated[int, Shown("Blocks brought back from the host's memory.", in_stats=False)] = 0
    kv_offload_disk_loads: Annotated[int, Shown("Blocks brought back from disk.", in_stats=False)] = 0
    lora_loads: Annotated[int, Shown("LoRA adapters loaded into a slot.", in_stats=False)] = 0
    kv_offload_faults: Annotated[int, Shown("Loads and writes of evicted blocks that failed.", in_stats=False)] = 0
    picture_hits: Annotated[int, Shown("Pictures whose features were found.", "picture_cache_hits", False)] = 0
    picture_seconds: float = 0.0
    pictures_within_100_ms: int = 0
    pictures_within_300_ms: int = 0
    pictures_within_1_s: int = 0
    pictures_within_3_s: int = 0
    pictures_within_10_s: int = 0
    pictures_within_30_s: int = 0
    pictures_encoded: int = 0

    def count_picture(self, seconds: float) -> None:
        """Count a picture that was encoded, and how long that took."""
        self.picture_seconds += seconds
        for bound, name in PICTURE_BUCKETS.items():
            if seconds <= float(bound):
                setattr(self, name, getattr(self, name) + 1)


PICTURE_BUCKETS: Final = {
    "0.1": "pictures_within_100_ms",
    "0.3": "pictures_within_300_ms",
    "1.0": "pictures_within_1_s",
    "3.0": "pictures_within_3_s",
    "10.0": "pictures_within_10_s",
    "30.0": "pictures_within_30_s",
    "+Inf": "pictures_encoded",
}
"""The counters of pictures that were encoded within so many seconds each."""


class Status(Counters):
    """One reading of the page.

    Attributes:
        epoch_id: Changes with every engine process; 0 means that no engine has written yet.
        is_ready: 1 once requests are served, 0 while loading and after an orderly end.
        progress_time: `time.monotonic` of the last sign of progress.
        has_work: 1 while requests run or wait.
        loaded_bytes, total_bytes: Bytes of the weights, while they load; 0 before and after.
        num_missing_machines: Machines that the engine waits for before it loads.
        stall_time: `time.monotonic` from which the engine counts as hanging if it has not written again; 0 for never.
        put_off_time: As stall_time, later: by the supervisor, for an engine that a busy machine keeps from running. The
            engine's next sign of life ends it.
        lora_names: `AdapterUse`, packed.
    """

    epoch_id: int = 0
    is_ready: int = 0
    progress_time: float = 0.0
    has_work: int = 0
    num_requests_running: Annotated[int, Shown("Requests in the running batch.")] = 0
    num_requests_waiting: Annotated[int, Shown("Requests that wait for room.")] = 0
    num_blocks: Annotated[int, Shown()] = 0
    num_used_blocks: Annotated[int, Shown()] = 0
    kv_offload_host_blocks: Annotated[int, Shown("Evicted blocks in the host's memory.", in_stats=False)] = 0
    kv_offload_disk_blocks: Annotated[int, Shown("Evicted blocks on disk.", in_stats=False)] = 0
    num_cached_blocks: Annotated[int, Shown("Blocks that can be found by content.", "kv_cache_indexed_blocks")] = 0
    loaded_bytes: int = 0
    total_bytes: int = 0
    num_missing_machines: int = 0
    stall_time: float = 0.0
    num_lora_slots: Annotated[int, Shown("LoRA adapters that may be used at once.", "lora_slots", in_stats=False)] = 0
    num_used_lora_slots: Annotated[int, Shown("Slots that hold a LoRA adapter.", "lora_slots_used", in_stats=False)] = 0
    put_off_time: float = 0.0
    lora_names: bytes = b""

    @property
    def loras(self) -> AdapterUse:
        """Which adapters are used, waited for and loaded."""
        return unpack(self.lora_names)

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has been silent for longer than it announced."""
        return self.stall_time > 0.0 and max(self.stall_time, self.put_off_time) <= time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return bool(self.is_ready) and not self.is_stalled


_FIELDS = Status.__struct_fields__
_HINTS = get_type_hints(Status, include_extras=True)
SHOWN: Final[dict[str, Shown]] = {
    name: _HINTS[name].__metadata__[0] for name in _FIELDS if get_origin(_HINTS[name]) is Annotated
}
"""The fields of a status that are shown to people."""

_VERSION_BYTES = 8
_TYPES = get_type_hints(Status)
MAX_NAME_BYTES = 6 << 10
_BODY = struct.Struct("=" + "".join({float: "d", int: "Q", bytes: f"{MAX_NAME_BYTES}s"}[_TYPES[n]] for n in _FIELDS))
_SIZE = _VERSION_BYTES + _BODY.size
_PUT_OFF = _VERSION_BYTES + 8 * _FIELDS.index("put_off_time")  # behind numbers of eight bytes each

_NUM_SPINS = 100
_NUM_TRIES = 200
_PAUSE_S = 5e-4
"""A reader tries this often, first without pauses, then with. That takes about 60 ms if the writer died in a write."""


class StatusPage:
    """The page itself. One writer (the engine process), but for `put_off`; any number of readers."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the page at path; create it, all zero, when it is missing. Raises OSError when there is no room."""
        file = os.open(pathlib.Path(path), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(file, 0, _SIZE)  # otherwise a write on a full disk kills the process
            self._map = mmap.mmap(file, _SIZE)
        finally:
            os.close(file)
        # One store of eight bytes. `struct.pack_into` clears its target first, so that readers would see a zero.
        self._version = memoryview(self._map)[:_VERSION_BYTES].cast("Q")
        self._put_off_time = memoryview(self._map)[_PUT_OFF : _PUT_OFF + 8].cast("d")

    def write(self, status: Status) -> None:
        """Replace the whole reading."""
        body = _BODY.pack(*msgspec.structs.astuple(status))
        version = self._version[0] | 1  # odd: a write is under way (or the last writer died in one)
        self._version[0] = version
        self._map[_VERSION_BYTES:_SIZE] = body
        self._version[0] = version + 1

    def read(self) -> Status:
        """Return the latest whole reading; a partly written one if the writer died while writing."""
        for attempt in range(_NUM_TRIES):
            if attempt >= _NUM_SPINS:
                time.sleep(_PAUSE_S)  # the writer lost its CPU in the middle of a write
            before = self._version[0]
            values = _BODY.unpack_from(self._map, _VERSION_BYTES)
            if before == self._version[0] and before % 2 == 0:
                break
        status = Status(**dict(zip(_FIELDS, values, strict=True)))
        status.lora_names = status.lora_names.partition(b"\0")[0]
        return status

    def put_off(self, time: float) -> None:
        """Replace the time until which the supervisor waits; the engine may be in the middle of a write."""
        self._put_off_time[0] = time

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._version.release()
        self._put_off_time.release()
        self._map.close()
