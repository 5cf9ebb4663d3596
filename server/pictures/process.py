"""Has pictures read by a process of their own, which may die of them (see `child`).

Owns that process: it is started for the first picture, which takes seconds, and kept until the model's engine has gone.
It serves one picture at a time (see `turns`). If it dies, the next picture starts another; if its processor cannot be
loaded, none is started for a while. Clients that leave have nothing more read than the picture at hand.
"""

import asyncio
import hashlib
import importlib.util
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final

from weft.engine.wire.waiting_threads import WaitingThreads
from weft.server.errors import EngineUnavailableError, InternalError, UnsupportedValueError
from weft.server.pictures.calls import Made
from weft.server.pictures.held import HeldPictures, Key, ReadPicture
from weft.server.pictures.reader import DIED, END_S, ReaderProcess
from weft.server.pictures.turns import Turns

MAX_FILES: Final = 8
"""That are fetched, decoded, or wait to be read at once; all others wait before that."""
FAULT_S: Final = 60.0
"""How long no other process is started once one could not load the processor."""


class PictureProcess:
    """The process of one model, which any task of one event loop may use.

    Attributes:
        files: Who calls `read` has a turn of these, which begins before it has the file: one may have 20 MiB.
    """

    def __init__(self, folder: Path) -> None:
        """Start none.

        Args:
            folder: That of the checkpoint.
        """
        self._folder = folder
        self._threads = WaitingThreads("pictures", 2)  # the one that reads, and one for digests
        self.files = Turns(MAX_FILES)
        self._turns = Turns()
        self._lock = threading.Lock()  # of the process: who has it uses it
        self._process: ReaderProcess | None = None
        self._fault: tuple[str, float] | None = None  # why none can be started, and until when none is
        self._num_closed = 0
        self.held = HeldPictures()

    async def read(self, data: bytes, token_id: int, tenant: str = "", dtype: str = "float32") -> ReadPicture:
        """What becomes of a file.

        Args:
            token_id: That of the engine's pictures.
            tenant: Who asks.
            dtype: In what the engine computes.

        Raises:
            InternalError: The checkpoint's processor cannot be loaded.
            UnsupportedValueError: Pillow is missing.
            QueueFullError: Too many wait, or too much is held.
            EngineUnavailableError: The engine has gone meanwhile.
        """
        if importlib.util.find_spec("PIL") is None:
            raise UnsupportedValueError(
                "this server cannot read pictures: the package is missing (pip install 'weft[images]')"
            )
        num_closed = self._num_closed  # what it was asked for is of the engine that is there now
        key = tenant, await asyncio.wrap_future(self._threads.submit(partial(_digest, data)))
        if (kept := self.held.find(key)) is not None:
            return kept
        results = list[ReadPicture]()  # and not a future's result, which lives until garbage is collected
        await self._turns.take(tenant)
        began = time.monotonic()

        def give_back(_: object = None) -> None:
            self._turns.give_back(tenant, time.monotonic() - began)

        try:
            read = partial(self._read, data, key, (token_id, dtype), num_closed, results)
            reading = asyncio.wrap_future(self._threads.submit(read))
        except BaseException:
            give_back()
            raise
        reading.add_done_callback(give_back)
        try:
            await asyncio.shield(reading)
        except asyncio.CancelledError:  # the thread goes on, and has its turn until it is done
            reading.add_done_callback(lambda _: results.clear())
            raise
        return results.pop()

    def _read(
        self, data: bytes, key: Key, engine: tuple[int, str], num_closed: int, results: list[ReadPicture]
    ) -> None:
        with self._lock:
            if (found := self.held.find(key)) is None:  # another request had it read meanwhile
                process = self._started(*engine, num_closed)
                made = process.read(data)
                self._check_open(num_closed)
                found = self._held(key, made, process, engine[0])
                if found.picture is None:
                    self.held.keep_fault(key, found)
            results.append(found)

    def _held(self, key: Key, made: Made, process: ReaderProcess, token_id: int) -> ReadPicture:
        if made.fault is not None:
            return ReadPicture(made, process.sign, None)
        try:
            return self.held.hold(key, made, process.sign, token_id, partial(process.shared, made))
        except EOFError:  # whoever lies about that is not trusted with another picture
            process.close()
            return ReadPicture(Made(DIED), process.sign, None)
        finally:
            process.empty()

    def _check_open(self, num_closed: int) -> None:
        if self._num_closed != num_closed:
            raise EngineUnavailableError()

    def _started(self, token_id: int, dtype: str, num_closed: int) -> ReaderProcess:
        """A process that has loaded the processor."""
        self._check_open(num_closed)
        if self._process is not None and self._process.is_alive:
            if self._process.engine == (token_id, dtype):
                return self._process
            self._process.kill()
        self._end()
        if self._fault is None or self._fault[1] < time.monotonic():
            fault = self._start(token_id, dtype)
            if self._num_closed != num_closed and self._process is not None:
                self._process.kill()  # `close` may not have waited for it
                self._end()
            self._check_open(num_closed)
            if self._process is not None:
                return self._process
            self._fault = fault, time.monotonic() + FAULT_S
        message = f"pictures cannot be read: the model's processor cannot be loaded ({self._fault[0]})"
        raise InternalError(f"{message}; it is tried again after {FAULT_S:g} s")

    def _start(self, token_id: int, dtype: str) -> str:
        """Start a process; why it cannot be, empty if it is."""
        try:
            self._process = ReaderProcess(self._folder, token_id, dtype)
        except OSError as error:
            return f"its process cannot be started: {error.strerror}"
        if fault := self._process.load_fault():
            self._end()
        return fault or ""

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def close(self) -> None:
        """End the process, if there is one, keep nothing, and let those who wait fail. A later picture starts another.

        To be called on the event loop, when the engine has gone.
        """
        self._num_closed += 1
        self.files.end()
        self._turns.end()
        self.held.forget()
        deadline = time.monotonic() + END_S
        while not self._lock.acquire(timeout=0.01):  # a thread uses the process, and notices its end
            if (process := self._process) is not None:
                process.kill()
            if time.monotonic() > deadline:  # it waits for a disk that hangs; the thread closes it then
                return
        try:
            if self._process is not None:
                self._process.kill()
            self._end()
            self._fault = None
        finally:
            self._lock.release()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
