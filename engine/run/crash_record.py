"""Which requests a step held when the engine died: the suspects.

Before a step is launched, the fingerprints of its requests are written to shared memory in the runtime directory,
which outlives the process. The next engine process reads them at start: each suspect then runs alone once, and is
refused only if the engine dies while it runs alone. A suspect that survives is cleared. Fingerprints say what is
computed (prompt and parameters), not who asked, so a retry by the same client is recognised.

Nobody is suspect or condemned for longer than `EXPIRY_S`. The supervisor removes the files: the step's when it was not
the engine's fault that it died (a SIGKILL from outside), the suspects' when its operator asks for that.
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

from weft.engine.shared.messages import STEP_NAME, SUSPECTS_NAME, AddRequest

Fingerprint = bytes

EXPIRY_S = 600.0
"""After this long without another crash of its own, a request runs like any other."""

_FINGERPRINT_BYTES = 16
_MAX_IN_STEP = 4096
_MAX_REMEMBERED = 1024
_COUNT = struct.Struct("<Q")

logger = logging.getLogger(__name__)


class _Memory(msgspec.Struct):
    """What is known of earlier crashes: survives in a small file, so that a second crash can tell.

    By fingerprint the time of the crash, on the clock of `time.monotonic`, which all processes share; the oldest first.
    """

    suspects: dict[bytes, float] = {}
    condemned: dict[bytes, float] = {}

    def add(self, kind: dict[bytes, float], requests: Iterable[Fingerprint], now: float) -> None:
        """Note a crash of some requests; the oldest are forgotten beyond a bound."""
        for request in requests:
            kind.pop(request, None)
            kind[request] = now
        for request in list(kind)[:-_MAX_REMEMBERED]:
            del kind[request]


def fingerprint(add: AddRequest) -> Fingerprint:
    """16 bytes that are equal for requests that compute the same thing, whatever their seed and sender."""
    params = msgspec.structs.replace(add.sampling_params, seed=0)
    content = msgspec.msgpack.encode((add.prompt_token_ids, params, add.num_choices, add.guidance, add.beams))
    return hashlib.blake2b(content, digest_size=_FINGERPRINT_BYTES).digest()


class CrashRecord:
    """Owner of the record. One engine process at a time."""

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
        """Whether it was in the step in which an engine died, so that it must run alone."""
        self._forget()
        return request in self._memory.suspects

    def is_condemned(self, request: Fingerprint) -> bool:
        """Whether an engine died while this request ran alone."""
        self._forget()
        return request in self._memory.condemned

    def begin_step(self, requests: Sequence[Fingerprint]) -> None:
        """Write down whose step is about to be launched; a memory copy, nothing is flushed."""
        listed = requests[:_MAX_IN_STEP]
        data = b"".join(listed)
        self._map[_COUNT.size : _COUNT.size + len(data)] = data
        _COUNT.pack_into(self._map, 0, len(listed))

    def end_step(self) -> None:
        """Nothing is launched any more: an engine that dies now leaves no suspects."""
        _COUNT.pack_into(self._map, 0, 0)

    def clear(self, request: Fingerprint) -> None:
        """A suspect ran while the engine lived."""
        if self.is_suspect(request):
            del self._memory.suspects[request]
            self._save()

    def _forget(self) -> None:
        """Drop what is too old, or all of it if somebody has removed the file."""
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
        self._has_file = self._memory_path.exists()  # else there is nothing that somebody could remove

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
    """Memory that outlives this process in a file; where there is no room for it, memory that does not."""
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
