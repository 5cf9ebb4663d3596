"""Has a file of sound decoded in a process of its own (see `sound_child`), and holds what came out of it.

File and sound are files without a name, so nothing of them is left, however a request or this process ends.
"""

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from dataclasses import dataclass
from typing import IO, Final

import msgspec

from weft.server.child_limits import child_environment
from weft.server.errors import (
    ApiError,
    BodyTooLargeError,
    InternalError,
    InvalidRequestError,
    UnsupportedParameterError,
)
from weft.server.http.form import CountedFile, FileRoom

DECODE_S: Final = 300.0
"""A process that takes longer is ended."""
_MAX_REPORT: Final = 4096


@dataclass(frozen=True, slots=True)
class Sound:
    """Samples of 16 bits, of one channel, in an open file."""

    kept: CountedFile
    num_samples: int
    rate: int

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.num_samples / self.rate

    def read(self, start: int, num_samples: int) -> bytes:
        """Some samples; fewer at the end."""
        return os.pread(self.kept.file.fileno(), 2 * num_samples, 2 * start)


class _Report(msgspec.Struct):
    samples: int = 0
    fault: str | None = None
    is_too_long: bool = False
    is_ours: bool = False


def check_decoder() -> None:
    """Refuse to decode where the library is missing."""
    if importlib.util.find_spec("av") is None:
        message = "file: this server cannot decode sound: the package is missing (pip install 'weft[audio]')"
        raise UnsupportedParameterError(message, param="file")


async def decode(source: IO[bytes], rate: int, max_s: float, places: asyncio.Semaphore, room: FileRoom) -> Sound:
    """Decode a file, which the caller closes, as it closes the sound.

    Args:
        source: Any format that is supported.
        rate: Samples of a second, of the result.
        max_s: Most seconds of sound.
        places: Bounds the processes.
        room: Bounds what they make.

    Raises:
        InvalidRequestError: It is damaged, holds no sound or exceeds a bound; 413 if it is too long.
        InternalError: The sound cannot be written.
        QueueFullError: There is no room for it.
    """
    source.seek(0)
    target = CountedFile(room)
    try:
        async with places:
            report = await _decoded(source, target.file, rate, max_s)
        if report.is_ours:
            raise InternalError(f"file: {report.fault}", param="file")
        if report.fault is not None:
            raise _error(report.fault, is_too_long=report.is_too_long)
        if report.samples < 1:
            raise _error("it holds no sound")
        target.count(2 * report.samples)
    except BaseException:
        target.close()
        raise
    return Sound(target, report.samples, rate)


async def _decoded(source: IO[bytes], target: IO[bytes], rate: int, max_s: float) -> _Report:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "weft.server.speech.sound_child"),
        *(str(target.fileno()), str(rate), str(max_s)),
        stdin=source.fileno(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        pass_fds=(target.fileno(),),
        env=child_environment(),
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DECODE_S):
            line = await process.stdout.read(_MAX_REPORT)
            await process.wait()
        return msgspec.json.decode(line, type=_Report)
    except TimeoutError:
        raise _error(f"to decode it takes more than {DECODE_S:g} s") from None
    except msgspec.MsgspecError:
        is_late = process.returncode == -signal.SIGPROF
        raise _error("to decode it takes too long" if is_late else "the decoder died of it") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())


def _error(fault: str, *, is_too_long: bool = False) -> ApiError:
    kind = BodyTooLargeError if is_too_long else InvalidRequestError
    return kind(f"file: {fault}", param="file")
