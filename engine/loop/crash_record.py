"""Records which requests a step holds, to find those of a crash, and says after which silence an engine counts as hung.

Before a step is launched, the fingerprints of its requests are written to shared memory in the runtime directory, which
outlives the process. The next engine process reads them at start: they are the suspects. Each suspect then runs alone
once. If the engine dies meanwhile, the request is condemned and refused; otherwise it is cleared. A fingerprint depends
on what is computed (prompt and parameters), not on the sender, so a retry is recognised.

Suspicion and condemnation end after `EXPIRY_S`. The supervisor removes the file of the step when the crash was not the
engine's fault (a SIGKILL from outside), and that of the suspects when its operator asks for it.
"""

import hashlib
import logging
import mmap
import os
import pathlib
import struct
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import STEP_NAME, SUSPECTS_NAME, AddRequest

logger = logging.getLogger(__name__)

Fingerprint = bytes

EXPIRY_S = 600.0
"""A request that caused no crash for this long runs like any other."""

_FINGERPRINT_BYTES = 16
_MAX_IN_STEP = 4096
_MAX_REMEMBERED = 1024
_COUNT = struct.Struct("<Q")


def fingerprint(add: AddRequest) -> Fingerprint:
    """16 bytes, equal for requests that compute the same, whatever their seed and sender."""
    params, given = msgspec.structs.replace(add.sampling_params, seed=0), add.input
    if isinstance(given, TokensInput):  # the digests of spans tell pictures apart, which are long
        given = msgspec.structs.replace(given, pictures=[])
    content = msgspec.msgpack.encode((given, params, add.num_choices, add.guidance, add.beams, add.adapter))
    return hashlib.blake2b(content, digest_size=_FINGERPRINT_BYTES).digest()


class _Memory(msgspec.Struct):
    """What is known of earlier crashes, kept in a small file.

    Maps a fingerprint to the time of its crash, the oldest first, on the clock of `time.monotonic`, which all processes
    share.
    """

    suspects: dict[bytes, float] = {}
    condemned: dict[bytes, float] = {}

    def add(self, kind: dict[bytes, float], requests: Iterable[Fingerprint], now: float) -> None:
        """Note a crash of these requests; beyond a bound the oldest are forgotten."""
        for request in requests:
            kind.pop(request, None)
            kind[request] = now
        for request in list(kind)[:-_MAX_REMEMBERED]:
            del kind[request]


class CrashRecord:
    """Owner of the record; one engine process at a time."""

    def __init__(self, runtime_dir: pathlib.Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._memory_path = runtime_dir / SUSPECTS_NAME
        self._memory = _Memory()
        self._has_file = self._memory_path.exists()
        if self._has_file:
            self._memory = msgspec.msgpack.decode(self._memory_path.read_bytes(), type=_Memory)
        self._map = _map_file(runtime_dir / STEP_NAME, _COUNT.size + _FINGERPRINT_BYTES * _MAX_IN_STEP)
        self._settle(self._read_step())
        self.end_step()

    def is_suspect(self, request: Fingerprint) -> bool:
        """Whether the request was in a step in which an engine died, so that it must run alone."""
        self._forget()
        return request in self._memory.suspects

    def is_condemned(self, request: Fingerprint) -> bool:
        """Whether an engine died while the request ran alone."""
        self._forget()
        return request in self._memory.condemned

    def begin_step(self, requests: Sequence[Fingerprint]) -> None:
        """Record the requests of the step about to be launched: a memory copy, nothing is flushed."""
        listed = requests[:_MAX_IN_STEP]
        data = b"".join(listed)
        self._map[_COUNT.size : _COUNT.size + len(data)] = data
        _COUNT.pack_into(self._map, 0, len(listed))

    def end_step(self) -> None:
        """Record that no step runs: an engine that dies now leaves no suspects."""
        _COUNT.pack_into(self._map, 0, 0)

    def clear(self, request: Fingerprint) -> None:
        """Clear a suspect that ran without a crash."""
        if self.is_suspect(request):
            del self._memory.suspects[request]
            self._save()

    def _forget(self) -> None:
        """Drop what has expired, or everything if the file was removed."""
        if self._has_file and not self._memory_path.exists():
            self._memory = _Memory()
        least = self._clock() - EXPIRY_S
        for kind in (self._memory.suspects, self._memory.condemned):
            for request in [request for request, crash_time in kind.items() if crash_time <= least]:
                del kind[request]

    def _settle(self, step: list[Fingerprint]) -> None:
        now = self._clock()
        if len(step) == 1 and self.is_suspect(step[0]):
            del self._memory.suspects[step[0]]
            self._memory.add(self._memory.condemned, step, now)
        else:
            self._memory.add(self._memory.suspects, step, now)
        self._save()
        self._has_file = self._memory_path.exists()  # if it could not be written, its absence means nothing

    def _read_step(self) -> list[Fingerprint]:
        (count,) = _COUNT.unpack_from(self._map)
        starts = range(_COUNT.size, _COUNT.size + count * _FINGERPRINT_BYTES, _FINGERPRINT_BYTES)
        return [bytes(self._map[start : start + _FINGERPRINT_BYTES]) for start in starts]

    def _save(self) -> None:
        temporary = self._memory_path.with_suffix(".new")
        try:
            temporary.write_bytes(msgspec.msgpack.encode(self._memory))
            temporary.replace(self._memory_path)
        except OSError as error:
            logger.warning(
                "The crash record cannot be saved (%s): the next engine knows older suspects", error.strerror
            )


def _map_file(path: pathlib.Path, size: int) -> mmap.mmap:
    """Memory backed by a file, which outlives this process; if there is no room for it, memory that does not."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            return mmap.mmap(file, size)
        finally:
            os.close(file)
    except OSError as error:
        logger.warning("No room for the crash record (%s): a crash will have no suspects", error.strerror)
        return mmap.mmap(-1, size)


_TIMES_PREDICTED = 10.0
_AT_LEAST_S = 10.0
_AT_LEAST_COMPILING_S = 30.0
"""On CUDA, where a step may have to compile a kernel first."""

_MARGIN = 2.0
"""A step predicted to take longer than the setting allows may take this many times its predicted time."""


class StallRule:
    """Turns the predicted time of steps into the longest silence allowed. Times are seconds.

    Probes, requests and the supervisor follow this one rule. The engine writes the time to its status page with every
    sign of life, because it alone can predict its steps. An idle engine still gives a sign of life every `heartbeat_s`,
    so that one that was stopped is noticed as well.
    """

    def __init__(self, timeout_s: float, device: str) -> None:
        """Take the setting (0: no limit) and the name of the device."""
        self._timeout_s = timeout_s
        self._at_least_s = _AT_LEAST_COMPILING_S if device.startswith("cuda") else _AT_LEAST_S
        self.heartbeat_s = min(1.0, timeout_s / 4) if timeout_s else None
        """How often an idle engine gives a sign of life; None for never."""

    def stall_time(self, now_s: float, predicted_s: float | None) -> float:
        """When an engine counts as hung if it gives no sign of life after now; 0 for never.

        Args:
            now_s: On the clock of `time.monotonic`, like the result.
            predicted_s: Of all steps on the device together; None without any, 0 if nothing was measured yet.
        """
        if not self._timeout_s:
            return 0.0
        if predicted_s == 0.0:
            return now_s + self._timeout_s
        needed_s = max(_TIMES_PREDICTED * (predicted_s or 0.0), self._at_least_s)
        return now_s + min(needed_s, max(self._timeout_s, _MARGIN * (predicted_s or 0.0)))
